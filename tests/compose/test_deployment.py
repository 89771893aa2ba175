"""compose.yaml on a real engine: images, both APIs, and containers that are killed and stopped."""

import json
import urllib.request
from collections.abc import Sequence

import pytest

from quire.client import Client, OutputDelta, SamplingParams
from tests.compose.deployment import SERVICES, Deployment
from tests.compose.engine import docker
from tests.compose.streams import PROMPTS, open_streams

pytestmark = [pytest.mark.docker, pytest.mark.timeout(3900)]

PROMPT = "def read_config(path):"
MAX_TOKENS = 48


@pytest.fixture(scope="module")
def undisturbed(built: Deployment) -> Sequence[str]:
    """The streams' outputs without a failure."""
    built.up()
    with open_streams(built.grpc) as streams:
        return streams.texts()


@pytest.mark.parametrize("service", SERVICES)
def test_only_the_worker_has_torch(built: Deployment, service):
    program = "import importlib.util as u; print(u.find_spec('torch') is not None)"
    image = built.image(service)
    has_torch = docker("run", "--rm", "--entrypoint", "python", image, "-c", program).strip()
    assert has_torch == str(service == "worker")


@pytest.mark.parametrize("service", SERVICES)
def test_processes_are_no_root_and_cannot_change_their_image(deployment: Deployment, service):
    program = "import os, sys; print(os.getuid(), os.access(sys.prefix, os.W_OK))"
    assert deployment.python(service, program) == "10001 False"


def test_worker_computes_with_the_kernels_in_its_image(deployment: Deployment):
    program = (
        "from pathlib import Path; from kernels.cpu.build import SHIPPED, find_or_build;"
        "print(find_or_build(Path('/nowhere')).path.parent == SHIPPED)"
    )
    assert deployment.python("worker", program) == "True"


def test_the_model_in_the_images_needs_no_volume(built: Deployment):
    program = "import os; print(sorted(os.listdir(os.environ['QUIRE_MODEL'])))"
    for service, name in (("router", "tokenizer.json"), ("worker", "model.safetensors")):
        image = built.image(service)
        assert name in docker("run", "--rm", "--entrypoint", "python", image, "-c", program)


def test_both_faces_stream_the_same(deployment: Deployment):
    deltas = _stream_over_grpc(deployment)
    chunks = _stream_over_http(deployment)
    assert len(deltas) > 1
    assert len(chunks) > 1
    assert "".join(deltas) == "".join(chunks)


@pytest.mark.parametrize("service", ["worker", "scheduler"])
def test_streams_go_on_when_a_container_is_killed(
    deployment: Deployment, undisturbed: Sequence[str], service
):
    with open_streams(deployment.grpc) as streams:
        deployment.kill(service)
        assert streams.num_live == len(PROMPTS), f"the {service} died too late to matter"
        assert streams.texts() == undisturbed
    deployment.up()  # fails if it is not healthy again
    assert _stream_over_grpc(deployment) != []


@pytest.mark.parametrize("service", ["worker", "scheduler"])
def test_streams_go_on_when_a_container_is_replaced(
    deployment: Deployment, undisturbed: Sequence[str], service
):
    with open_streams(deployment.grpc) as streams:
        deployment.stop(service)
        assert streams.num_live == len(PROMPTS), f"the {service} ended too late to matter"
        assert deployment.exit_code(service) == 0
        deployment.up()
        assert streams.texts() == undisturbed


def test_a_stopped_router_ends_its_streams_first(
    deployment: Deployment, undisturbed: Sequence[str]
):
    with open_streams(deployment.grpc) as streams:
        deployment.stop("router")
        assert deployment.exit_code("router") == 0
        assert streams.texts() == undisturbed


def _stream_over_grpc(deployment: Deployment) -> list[str]:
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    with Client(deployment.grpc) as client:
        events = client.generate(PROMPT, sampling, timeout_s=60)
        return [event.text for event in events if isinstance(event, OutputDelta)]


def _stream_over_http(deployment: Deployment) -> list[str]:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": MAX_TOKENS, "stream": True}
    request = urllib.request.Request(
        f"http://{deployment.http}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        lines = [line.decode().strip() for line in response]
    events = [line.removeprefix("data: ") for line in lines if line and line != ":"]
    assert events.pop() == "[DONE]"
    return [json.loads(event)["choices"][0]["text"] for event in events]
