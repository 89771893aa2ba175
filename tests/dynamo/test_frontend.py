"""Dynamo's frontend before two cells, each of which its sidecar calls over `openengine.v1`.

It needs neither etcd nor NATS: processes find each other by files. `make dynamo-test` installs it.
"""

import contextlib
import os
import subprocess
from pathlib import Path

import openai
import pytest

from tests.dynamo.installed import dynamo_python
from tests.e2e.child import eventually
from tests.smg.gateway import MODEL, Cell, free_port
from tests.smg.load import complete, kill_in_turn

NUM_KILLS = int(os.environ.get("KILLS", "4"))
pytestmark = [pytest.mark.dynamo, pytest.mark.timeout(600 + 60 * NUM_KILLS)]
NAME = MODEL.name
SIDECAR = "import sys; from dynamo._core import backend; backend._run_trtllm_sidecar(sys.argv[1:])"
PLANES = ["--discovery-backend=file", "--request-plane=tcp", "--event-plane=zmq"]
LOOPBACK = dict.fromkeys(
    ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST"), "127.0.0.1"
)


@contextlib.contextmanager
def running(command: list[str], log: Path):
    """Run a process of Dynamo where the model's path is its name."""
    environment = {**os.environ, **LOOPBACK, "DYN_FILE_KV": str(log.parent / "discovery")}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=MODEL.parent, env=environment
        )
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cells")
    flags = ["--openengine"]
    with (
        Cell(directory / "0", MODEL, router=flags) as first,
        Cell(directory / "1", MODEL, router=flags) as second,
    ):
        yield first, second


@pytest.fixture(scope="module")
def client(cells, tmp_path_factory):
    python, logs, port = dynamo_python(), tmp_path_factory.mktemp("dynamo"), free_port()
    with contextlib.ExitStack() as stack:
        for number, cell in enumerate(cells):
            command = [python, "-c", SIDECAR, f"--grpc-endpoint={cell.target}", *PLANES]
            command.append(f"--model-path={NAME}")
            stack.enter_context(running(command, logs / f"sidecar-{number}.log"))
        frontend = [python, str(Path(__file__).with_name("frontend.py")), str(port)]
        stack.enter_context(running(frontend, logs / "frontend.log"))
        client = stack.enter_context(
            openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        )
        before = [num_queries(cell) for cell in cells]

        def reaches_both() -> bool | None:
            with contextlib.suppress(openai.OpenAIError):
                complete(client, "x", 1)
            return all(map(int.__lt__, before, map(num_queries, cells))) or None

        try:
            eventually(reaches_both, "the frontend has found the cells")
        except AssertionError as error:
            for log in logs.glob("*.log"):
                error.add_note(log.read_text()[-3000:])
            raise
        yield client


def num_queries(cell):
    return cell.load().num_prefix_cache_queries


def test_answers_are_those_of_a_cell(client, cells):
    assert [model.id for model in client.models.list()] == [NAME]
    with openai.OpenAI(base_url=f"{cells[0].url}/v1", api_key="none") as direct:
        for prompt in ("def add(", "import os\n"):
            through = complete(client, prompt)
            own = complete(direct, prompt, extra_body={"add_special_tokens": False})
            assert through.choices[0].text == own.choices[0].text
            assert through.choices[0].finish_reason == own.choices[0].finish_reason
            assert through.usage.completion_tokens == own.usage.completion_tokens
        messages = [{"role": "user", "content": "def add("}]
        through, own = (
            each.chat.completions.create(
                model=NAME, messages=messages, max_tokens=16, temperature=0
            )
            for each in (client, direct)
        )
        assert through.choices[0].message.content == own.choices[0].message.content


def test_no_kill_of_a_scheduler_or_worker_loses_a_request(client, cells):
    load = kill_in_turn(client, cells, NUM_KILLS)
    assert load.lost == []
    assert load.num_done >= 12
