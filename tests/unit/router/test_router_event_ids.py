"""A client continues a broken HTTP stream with the id of the last event it read."""

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web
from router_fake_scheduler import LENGTH

from contract.codec.packing import pack_int32, pack_uint64
from contract.errors import InvalidArgumentError
from contract.outputs import FinishReason, OutputDelta, OutputFinished
from contract.request import OutputReceived
from quire.v1 import scheduler_pb2
from router.http.answers.event_ids import StreamPosition, parse_event_id
from router.http.api import routes
from router.operators.adapters_and_models import Operations
from rpc.security.operators import Operators

pytestmark = pytest.mark.timeout(120)

RESUMABLE = {"X-Quire-Resumable": "true"}
TEXT = "one 🙂 two three"


@pytest.fixture
async def http(router):
    app = web.Application()
    operators = Operators(None, has_client_certificates=False, obeys_loopback=False)
    adapters = Operations(router.cells, operators)
    app.add_routes(routes(router.cells, adapters, max_body_bytes=2**20))
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
        yield session
    await runner.cleanup()


async def read_event(response):
    """The next event: its id and its data; None at the end."""
    event_id, data = "", None
    while line := (await response.content.readline()).decode().removesuffix("\n"):
        field, _, value = line.partition(": ")
        event_id, data = (value, data) if field == "id" else (event_id, value)
    return None if data is None else (event_id, data if data == "[DONE]" else json.loads(data))


def text_of(choice):
    return choice["text"] if "text" in choice else choice["delta"].get("content", "")


async def break_off(router, http, path, body, tokens):
    """Starts a stream, reads an event and disconnects; returns its text, its id, and the submit."""
    calling = asyncio.create_task(http.post(path, json=body, headers=RESUMABLE))
    submit = await router.scheduler.submits.get()
    await router.scheduler.step({submit.first_seq_key: tokens})
    response = await calling
    event_id, chunk = await read_event(response)
    response.close()
    await router.scheduler.leaves.get()
    return text_of(chunk["choices"][0]), event_id, submit


async def go_on(router, http, path, body, event_id, submit, tokens, num_known, *, ended=False):
    """Continues the stream with a new call; returns the events."""
    headers = {"Last-Event-ID": event_id}
    calling = asyncio.create_task(http.post(path, json=body, headers=headers))
    asked = await router.scheduler.resumes.get()
    assert asked.request_id == submit.request_id
    key = asked.first_seq_key
    known = scheduler_pb2.StepOutput(
        seq_keys=pack_uint64([key] * num_known), token_ids=pack_int32(tokens[:num_known])
    )
    if ended:
        known.finished.add(seq_key=key, finish_reason=LENGTH)
    await router.scheduler.resumed(submit, key, known)
    await router.scheduler.step({key: tokens[num_known:]}, finished={key: LENGTH})
    events = []
    async with await calling as response:
        assert response.status == 200
        assert response.headers["X-Request-Id"] == submit.request_id
        while (event := await read_event(response)) is not None:
            events.append(event)
    return events


@pytest.mark.parametrize(
    ("path", "prompt", "echo"),
    [
        ("/v1/completions", {"prompt": "a"}, ""),
        ("/v1/completions", {"prompt": "a", "echo": True}, "a"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, ""),
    ],
)
async def test_a_stream_goes_on_behind_the_last_event(router, http, path, prompt, echo):
    body = {**prompt, "stream": True, "max_tokens": 40, "stream_options": {"include_usage": True}}
    tokens = router.tokens(TEXT)
    first, event_id, submit = await break_off(router, http, path, body, tokens[:6])
    assert submit.HasField("resume_record")
    *events, (_, usage), (_, done) = await go_on(
        router, http, path, body, event_id, submit, tokens, num_known=8
    )
    assert done == "[DONE]"
    assert first + "".join(text_of(chunk["choices"][0]) for _, chunk in events) == echo + TEXT
    assert all("role" not in chunk["choices"][0].get("delta", {}) for _, chunk in events)
    assert usage["usage"]["completion_tokens"] == len(tokens)
    assert {chunk["id"].split("-", 1)[1] for _, chunk in events} == {submit.request_id}
    request_id, received = parse_event_id(events[-1][0])
    assert request_id == submit.request_id
    assert received == {0: OutputReceived(len(tokens), len(TEXT.encode()), finished=True)}


async def test_a_client_that_lacks_only_the_end_of_the_stream_gets_it(router, http):
    body = {"prompt": "a", "stream": True}
    tokens = router.tokens("ab")
    _, event_id, submit = await break_off(router, http, "/v1/completions", body, tokens)
    events = await go_on(
        router, http, "/v1/completions", body, event_id, submit, tokens, num_known=len(tokens)
    )
    assert [data if data == "[DONE]" else data["choices"][0]["finish_reason"] for _, data in events]
    again = await go_on(
        router,
        http,
        "/v1/completions",
        body,
        events[0][0],
        submit,
        tokens,
        num_known=len(tokens),
        ended=True,
    )
    assert [data for _, data in again] == ["[DONE]"]
    again = await go_on(
        router,
        http,
        "/v1/completions",
        {**body, "stream_options": {"include_usage": True}},
        events[0][0],
        submit,
        tokens,
        num_known=len(tokens),
        ended=True,
    )
    (_, usage), (_, done) = again
    assert (usage["usage"]["completion_tokens"], done) == (len(tokens), "[DONE]")


async def test_events_of_what_cannot_be_resumed_have_no_ids(router, http):
    calling = asyncio.create_task(
        http.post("/v1/completions", json={"prompt": "a", "stream": True})
    )
    submit = await router.scheduler.submits.get()
    key = submit.first_seq_key
    await router.scheduler.step({key: router.tokens("ab")}, finished={key: LENGTH})
    async with await calling as response:
        assert "id: " not in (await response.text())


@pytest.mark.parametrize(
    ("event_id", "body"),
    [
        ("0.1.1", {"stream": True}),
        ("/r", {"stream": True}),
        ("0.1/r", {"stream": True}),
        ("0.1.1,/r", {"stream": True}),
        ("0.1.1." * 1000 + "/r", {"stream": True}),
        ("0.1.1/r", {}),
        ("0.1.1/r", {"stream": True, "prompt": ["a", "b"]}),
        ("0.1.1/r", {"stream": True, "prompt_logprobs": 1}),
    ],
)
async def test_an_id_that_is_none_is_refused_by_name(http, event_id, body):
    headers = {"Last-Event-ID": event_id}
    async with http.post(
        "/v1/completions", json={"prompt": "a", **body}, headers=headers
    ) as response:
        assert response.status == 400
        assert "Last-Event-ID" in (await response.json())["error"]["message"]


def test_an_event_id_encodes_what_the_reader_has():
    position = StreamPosition("a/b é", {0: OutputReceived(1, 2)})
    position.advance(OutputDelta(1, 0, (7, 8), "é", ()))
    event_id = position.advance(OutputFinished(0, FinishReason.STOP))
    assert event_id.isascii()
    assert parse_event_id(event_id) == (
        "a/b é",
        {0: OutputReceived(1, 2, finished=True), 1: OutputReceived(2, 2)},
    )
    with pytest.raises(InvalidArgumentError):
        parse_event_id(event_id + "\n")
