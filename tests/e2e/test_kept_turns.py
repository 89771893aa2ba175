"""Stored turns survive the death of all processes, with the texts of an undisturbed run."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from quire.cli.up import ports
from quire.v1 import inference_pb2
from tests.e2e.child import START_S, Child, eventually
from tests.e2e.service import Service

ASKS = (
    {"input": "Say", "temperature": 0.0, "seed": 5},
    {"input": "Write more", "temperature": 0.9, "seed": 6},
)
OPTIONS = {"max_output_tokens": 400, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def own(long_llama: Path, run_dir: Callable[[], Path]) -> Iterator[Service]:
    """A service that stores turns; the test kills its processes and starts them again."""
    directory = run_dir()
    flags = [f"--turn-store={directory}/turns.sqlite", "--served-model-name=tiny"]
    with Service(
        directory,
        long_llama,
        worker=["--num-blocks=600", "--served-model-name=tiny"],
        router=flags,
    ) as service:
        yield service


def is_running(pid: str) -> bool:
    return Path(f"/proc/{pid}").exists()


class Up:
    """A whole service of `quire up`, which is killed and started again."""

    def __init__(self, directory: Path, model: Path) -> None:
        port = ports.require_free("127.0.0.1", 0, "--http-port")
        others = ("grpc", "scheduler-http", "worker-http")
        self.url = f"http://127.0.0.1:{port}"
        self._flags = (
            *("up", f"--model={model}", "--served-model-name=tiny", "--device=cpu"),
            *("--num-blocks=600", f"--turn-store={directory}/turns.sqlite"),
            *(f"--http-port={port}", *(f"--{name}-port=0" for name in others)),
        )
        self._child = Child("quire.cli", directory / "up.log", {"XDG_RUNTIME_DIR": str(directory)})

    def start(self) -> None:
        self._child.start(self._flags)
        eventually(self._is_ready, "the service is ready", START_S)

    def _is_ready(self) -> bool | None:
        self._child.check_alive()
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5):
                return True
        except OSError:
            return None

    def kill_all(self) -> None:
        """Kills all processes at once, and waits until they have ended."""
        parent = self._child.pid
        pids = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        assert len(pids) == 3, "router, scheduler and worker"
        for pid in map(int, pids):
            os.kill(pid, signal.SIGKILL)
        self._child.kill()
        eventually(lambda: not any(map(is_running, pids)) or None, "all processes have ended")

    def stop(self) -> None:
        self._child.stop()


@pytest.fixture
def up(long_llama: Path, run_dir: Callable[[], Path]) -> Iterator[Up]:
    directory = run_dir()
    directory.mkdir(mode=0o700)
    service = Up(directory, long_llama)
    service.start()
    yield service
    service.stop()


def client(service: Service | Up) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)


def ask(service: Up, fields: dict[str, object], **more: object) -> object:
    named = {name: value for name, value in fields.items() if name != "seed"}
    options = OPTIONS | {"extra_body": OPTIONS["extra_body"] | {"seed": fields["seed"]}}
    return client(service).responses.create(model="tiny", **named, **options, **more)


def start_batch(service: Up) -> str:
    """Starts a batch of which some lines are short and some long."""
    lines = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": "tiny",
                "prompt": "Say",
                "temperature": 0.9,
                "seed": i,
                "max_tokens": 400 if i % 2 else 10,
                "ignore_eos": True,
            },
        }
        for i in range(6)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    calls = client(service)
    file = calls.files.create(file=("in.jsonl", content), purpose="batch")
    return calls.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    ).id


def answers(service: Up, batch_id: str) -> list[tuple[str, str, object]]:
    """Returns the texts and the usage of a batch's lines, when it has ended."""
    calls = client(service)

    def output_file() -> str | None:
        batch = calls.batches.retrieve(batch_id)
        assert batch.request_counts.failed == 0
        return batch.output_file_id if batch.status == "completed" else None

    content = calls.files.content(eventually(output_file, "the batch has ended")).text
    told = sorted(map(json.loads, content.splitlines()), key=lambda line: line["custom_id"])
    bodies = [line["response"]["body"] for line in told]
    return [
        (line["custom_id"], body["choices"][0]["text"], body["usage"]["completion_tokens"])
        for line, body in zip(told, bodies, strict=True)
    ]


def test_turns_and_a_batch_go_on_after_all_processes_were_killed_at_once(up: Up):
    undisturbed = [ask(up, fields, store=False).output_text for fields in ASKS]
    lines = answers(up, start_batch(up))
    assert [num_tokens for *_, num_tokens in lines] == [10, 400] * 3
    accepted = [ask(up, fields, background=True, stream=True) for fields in ASKS]
    batch_id = start_batch(up)
    events: list[list[object]] = [[], []]
    for stream, seen in zip(accepted, events, strict=True):
        for event in stream:
            seen.append(event)
            if len(seen) == 30:  # while the turn runs
                break
        stream.close()

    def counts() -> object | None:
        found = client(up).batches.retrieve(batch_id).request_counts
        return found if found.completed else None

    assert eventually(counts, "some lines are answered").completed < len(lines)
    up.kill_all()
    up.start()
    for seen, text in zip(events, undisturbed, strict=True):
        response_id = seen[0].response.id

        def has_ended(response_id: str = response_id) -> object | None:
            response = client(up).responses.retrieve(response_id)
            return response if response.status not in ("queued", "in_progress") else None

        response = eventually(has_ended, "the turn has ended")
        assert (response.status, response.output_text) == ("incomplete", text)
        # The stream continues after the last event that its client read.
        rest = client(up).responses.retrieve(
            response_id, stream=True, starting_after=seen[-1].sequence_number
        )
        whole = [*seen, *rest]
        assert [event.sequence_number for event in whole] == list(range(len(whole)))
        deltas = [e.delta for e in whole if e.type == "response.output_text.delta"]
        assert "".join(deltas) == text
    assert answers(up, batch_id) == lines


def usage_of(service: Service, tenant: str) -> dict[str, int]:
    command = [sys.executable, "-m", "quire.cli", "usage", "--json", "--by", "tenant,model"]
    shown = subprocess.run(
        [*command, "--target", service.target], check=True, capture_output=True, timeout=60
    ).stdout
    rows = [json.loads(line) for line in shown.splitlines()]
    return next((row for row in rows if row["tenant"] == tenant), {"requests": 0})


def test_usage_counts_every_kind_of_request_and_outlives_the_router(own: Service):
    said = {"model": "tiny", "messages": [{"role": "user", "content": "Say"}], "max_tokens": 5}
    calls = openai.OpenAI(
        base_url=f"{own.url}/v1", api_key="none", default_headers={"x-quire-tenant": "meter"}
    )
    request = inference_pb2.GenerateRequest(text="Say")
    request.sampling.max_tokens = 5
    answers = list(own.stub.Generate(request, metadata=(("x-quire-tenant", "meter"),)))
    prompt = answers[-1].usage.prompt_tokens
    generated = answers[-1].usage.completion_tokens
    chat = calls.chat.completions.create(**said).usage
    message = calls.post("/messages", cast_to=object, body=said)["usage"]
    response = calls.responses.create(model="tiny", input="Say", max_output_tokens=5).usage
    unkept = calls.responses.create(model="tiny", input="Say", store=False).usage
    text = calls.completions.create(model="tiny", prompt="Say", max_tokens=5).usage
    vectors = calls.embeddings.create(model="tiny", input=["a", "b"]).usage
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": said}
    file = calls.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = calls.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    eventually(lambda: calls.batches.retrieve(batch.id).output_file_id, "the batch has ended")
    prompt += chat.prompt_tokens * 2 + text.prompt_tokens + vectors.prompt_tokens
    prompt += response.input_tokens + unkept.input_tokens
    prompt += message["input_tokens"] + message["cache_read_input_tokens"]
    generated += text.completion_tokens + message["output_tokens"] + chat.completion_tokens
    generated += response.output_tokens + unkept.output_tokens

    def is_counted() -> dict[str, int] | None:
        row = usage_of(own, "meter")
        return row if row["requests"] == 9 else None

    row = eventually(is_counted, "all requests are counted")
    assert (row["prompt_tokens"], row["reasoning_tokens"]) == (prompt, 0)
    # tokens of the line, and of the vectors
    assert 1 <= row["generated_tokens"] - generated <= 5 + 2
    own.router.kill()
    own.start_router()
    own.wait_until_ready()
    assert usage_of(own, "meter") == row
    with pytest.raises(openai.PermissionDeniedError, match="shows usage only for callers on its"):
        client(own).get("/usage", cast_to=object)
