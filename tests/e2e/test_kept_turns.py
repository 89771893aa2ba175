"""Turns that are kept outlive all processes: their texts are those of an undisturbed run."""

from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.child import eventually
from tests.e2e.service import Service

ASKS = (
    {"input": "Say", "temperature": 0.0, "seed": 5},
    {"input": "Write more", "temperature": 0.9, "seed": 6},
)
OPTIONS = {"max_output_tokens": 400, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def own(long_llama: Path, run_dir: Callable[[], Path]) -> Iterator[Service]:
    """A service that keeps turns, whose processes the test kills and starts again."""
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
            if len(seen) == 30:  # under way
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
        # The stream continues where its client was, as if nothing had happened.
        rest = client(own).responses.retrieve(
            response_id, stream=True, starting_after=seen[-1].sequence_number
        )
        whole = [*seen, *rest]
        assert [event.sequence_number for event in whole] == list(range(len(whole)))
        deltas = [e.delta for e in whole if e.type == "response.output_text.delta"]
        assert "".join(deltas) == text
