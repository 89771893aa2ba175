"""Stored turns survive the death of all processes, with the texts of an undisturbed run."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from quire.v1 import inference_pb2
from tests.e2e.child import eventually
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


def client(service: Service) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)


def ask(service: Service, fields: dict[str, object], **more: object) -> object:
    named = {name: value for name, value in fields.items() if name != "seed"}
    options = OPTIONS | {"extra_body": OPTIONS["extra_body"] | {"seed": fields["seed"]}}
    return client(service).responses.create(model="tiny", **named, **options, **more)


def test_turns_go_on_after_all_processes_were_killed_at_once(own: Service):
    undisturbed = [ask(own, fields, store=False).output_text for fields in ASKS]
    accepted = [ask(own, fields, background=True, stream=True) for fields in ASKS]
    events: list[list[object]] = [[], []]
    for stream, seen in zip(accepted, events, strict=True):
        for event in stream:
            seen.append(event)
            if len(seen) == 30:  # while the turn runs
                break
        stream.close()
    for child in (own.router, own.scheduler, own.worker):
        child.kill()
    own.start_worker()
    own.start_scheduler()
    own.start_router()
    own.wait_until_ready()
    for seen, text in zip(events, undisturbed, strict=True):
        response_id = seen[0].response.id

        def has_ended(response_id: str = response_id) -> object | None:
            response = client(own).responses.retrieve(response_id)
            return response if response.status not in ("queued", "in_progress") else None

        response = eventually(has_ended, "the turn has ended")
        assert (response.status, response.output_text) == ("incomplete", text)
        # The stream continues after the last event that its client read.
        rest = client(own).responses.retrieve(
            response_id, stream=True, starting_after=seen[-1].sequence_number
        )
        whole = [*seen, *rest]
        assert [event.sequence_number for event in whole] == list(range(len(whole)))
        deltas = [e.delta for e in whole if e.type == "response.output_text.delta"]
        assert "".join(deltas) == text


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
