"""Streams: exact bytes, backpressure, and clients that disconnect."""

import asyncio
import json
import socket

import pytest
from openai_fakes import delta, spell

from contract.errors import UnavailableError
from contract.outputs import FinishReason, OutputFinished, Usage
from router.http.answers import sse, streaming

HELLO = [{"role": "user", "content": "Hello"}]

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: quire.test\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n"
)


async def test_a_stream_byte_for_byte(http, inference):
    inference.script = spell("é", stop_string="\n")
    body = {"prompt": "x", "stream": True, "request_id": "r"}
    async with http.post("/v1/completions", json=body) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache"
        text = await response.text()
    head = '"id":"cmpl-r","object":"text_completion","created":1700000000,"model":"org/tiny"'
    assert text == (
        f'data: {{{head},"choices":[{{"index":0,"text":"é","logprobs":null,'
        '"finish_reason":null}]}\n\n'
        f'data: {{{head},"choices":[{{"index":0,"text":"","logprobs":null,'
        '"finish_reason":"stop","stop_reason":"\\n"}]}\n\n'
        "data: [DONE]\n\n"
    )


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}])
async def test_chunks_differ_only_in_their_text(http, inference, path, more):
    text = 'a"\\\n\u2028é🙂\0%b{"text":"x"}'
    inference.script = spell(text)
    asked = {"prompt": "x"} if path == "completions" else {"messages": HELLO}
    body = {**asked, "stream": True, "n": 2, "request_id": "r", **more}
    async with http.post(f"/v1/{path}", json=body) as response:
        lines = (await response.text()).split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    for index in range(2):
        choices = [
            c["choices"][0]
            for c in chunks
            if c["choices"][:1] and c["choices"][0]["index"] == index
        ]
        said = [choice.get("text", choice.get("delta", {}).get("content")) for choice in choices]
        assert said[: len(text)] == list(text)
        plain = [{**choice, "text": "", "delta": ""} for choice in choices[1 : len(text)]]
        assert plain == [plain[0]] * (len(text) - 1)
        assert plain[0]["finish_reason"] is None
    heads = [{**chunk, "choices": []} for chunk in chunks if chunk["choices"]]
    assert heads == [heads[0]] * len(heads)
    assert ("usage" in heads[0]) == bool(more)


async def test_usage_is_null_until_the_last_chunk(http):
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    async with http.post("/v1/chat/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in (await response.text()).split("\n\n")]
    *chunks, last = map(json.loads, lines[:-2])
    assert len(chunks) == 4
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 3


async def test_a_stream_that_fails_has_no_done(http, inference):
    async def script(_):
        yield delta("a")
        raise UnavailableError("the scheduler is lost")

    inference.script = script
    async with http.post("/v1/completions", json={"prompt": "x", "stream": True}) as response:
        assert response.status == 200
        *_, last, end = (await response.text()).split("\n\n")
    assert end == ""
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["message"], error["code"]) == ("the scheduler is lost", None)


async def test_each_event_is_sent_when_it_comes(http, inference):
    more = asyncio.Event()

    async def script(_):
        yield delta("a")
        await more.wait()
        yield OutputFinished(0, FinishReason.STOP)
        yield Usage(1, 1, 0)

    inference.script = script
    async with http.post("/v1/completions", json={"prompt": "x", "stream": True}) as response:
        first = await response.content.readuntil(b"\n\n")
        assert b'"text":"a"' in first
        more.set()
        assert (await response.content.read()).endswith(b"data: [DONE]\n\n")


async def test_a_stream_without_events_has_comments(http, inference, monkeypatch):
    more = asyncio.Event()

    async def script(_):
        yield delta("a")
        await more.wait()
        yield OutputFinished(0, FinishReason.STOP)
        yield Usage(1, 1, 0)

    monkeypatch.setattr(sse, "_HEARTBEAT_S", 0.01)
    inference.script = script
    async with http.post("/v1/completions", json={"prompt": "x", "stream": True}) as response:
        await response.content.readuntil(b"\n\n")
        assert await response.content.readuntil(b"\n\n") == b":\n\n"
        assert await response.content.readuntil(b"\n\n") == b":\n\n"
        more.set()
        assert (await response.content.read()).endswith(b"data: [DONE]\n\n")


async def test_a_stream_whose_first_event_takes_long_has_comments_before_it(
    http, inference, monkeypatch
):
    more = asyncio.Event()

    async def script(_):
        await more.wait()
        yield delta("a")
        yield OutputFinished(0, FinishReason.STOP)
        yield Usage(1, 1, 0)

    monkeypatch.setattr(streaming, "STATUS_WITHIN_S", 0.01)
    monkeypatch.setattr(sse, "_HEARTBEAT_S", 0.01)
    inference.script = script
    async with http.post("/v1/completions", json={"prompt": "x", "stream": True}) as response:
        assert response.status == 200
        assert await response.content.readuntil(b"\n\n") == b":\n\n"
        more.set()
        rest = (await response.content.read()).lstrip(b":\n")
    assert rest.startswith(b"data: ")
    assert b'"text":"a"' in rest
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_an_error_that_comes_late_instead_of_the_first_event_is_an_event(
    http, inference, monkeypatch
):
    more = asyncio.Event()

    async def script(_):
        await more.wait()
        raise UnavailableError("the worker is gone")
        yield

    monkeypatch.setattr(streaming, "STATUS_WITHIN_S", 0.01)
    inference.script = script
    async with http.post("/v1/completions", json={"prompt": "x", "stream": True}) as response:
        assert response.status == 200
        more.set()
        (event,) = (await response.content.read()).split(b"\n\n")[:-1]
    assert json.loads(event.removeprefix(b"data: "))["error"]["message"] == "the worker is gone"


@pytest.mark.parametrize("status_within_s", [0.01, 60])
@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_a_client_that_leaves_before_the_first_event_ends_its_requests(
    server, inference, monkeypatch, status_within_s, num_prompts
):
    begun, ended = asyncio.Semaphore(0), asyncio.Semaphore(0)

    async def script(_):
        begun.release()
        try:
            await asyncio.Event().wait()
            yield
        finally:
            ended.release()

    monkeypatch.setattr(streaming, "STATUS_WITHIN_S", status_within_s)
    inference.script = script
    body = json.dumps({"prompt": ["x"] * num_prompts, "stream": True}).encode()
    reader, writer = await asyncio.open_connection(*server)
    writer.write(HEAD % len(body) + body)
    for _ in range(num_prompts):
        await begun.acquire()
    if status_within_s < 1:
        await reader.readuntil(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    async with asyncio.timeout(10):
        for live in inference.lives:
            await ended.acquire()
            await live.closed.wait()
    assert len(inference.lives) == num_prompts


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_a_client_that_leaves_ends_its_requests(server, inference, stream, num_prompts):
    async def script(_):
        yield delta("a")
        await asyncio.Event().wait()

    inference.script = script
    body = json.dumps({"prompt": ["x"] * num_prompts, "stream": stream}).encode()
    reader, writer = await asyncio.open_connection(*server)
    writer.write(HEAD % len(body) + body)
    if stream:
        await reader.readuntil(b'"text":"a"')
    await inference.generated.wait()
    writer.close()
    await writer.wait_closed()
    async with asyncio.timeout(10):
        for live in inference.lives:
            await live.closed.wait()
    assert len(inference.lives) == num_prompts


async def test_a_client_that_never_reads_stops_only_its_own_stream(server, http, inference):
    def script(request):
        return spell("x" * 100_000 if request.request_id == "sleeper" else "Hi!")(request)

    inference.script = script
    sleeper = socket.create_connection(server)
    sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body = json.dumps({"prompt": "x", "stream": True, "request_id": "sleeper"}).encode()
    sleeper.sendall(HEAD % len(body) + body)
    await inference.generated.wait()
    (live,) = inference.lives
    taken = -1
    while live.num_taken != taken:  # until the socket is full and the stream stops
        taken = live.num_taken
        async with http.post("/v1/completions", json={"prompt": "x"}) as response:
            assert (await response.json())["choices"][0]["text"] == "Hi!"
    assert 0 < taken < 100_000
    sleeper.close()
    async with asyncio.timeout(10):
        await live.closed.wait()
