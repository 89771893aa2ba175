"""Streams as bytes: each is one whole HTTP message, however it ends.

`http_messages` reads as strictly as RFC 9112 allows, because clients forgive different faults:
aiohttp's waits for ever after a body with wrong framing.
"""

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web
from openai_fakes import FakeAdapters, FakeCells, FakeInference, delta, play, spell
from router_fake_scheduler import ERROR, LENGTH

from contract.errors import UnavailableError
from contract.outputs import FinishReason, OutputError, OutputFinished
from quire.v1 import common_pb2
from router.http.answers import streaming
from router.http.answers.sse import SseResponse
from router.http.api import routes
from router.http.endpoint import endpoint
from router.stored_turns.database import open_database
from router.stored_turns.store import TurnStore
from router.stored_turns.turns import Turns

pytestmark = pytest.mark.timeout(60)

CALLS = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {
        "model": "org/tiny",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "x"}],
    },
}
LOST = OutputError(14, "the worker is gone", retryable=False)
SCRIPTS = {
    "whole": spell("héé!"),
    "empty": spell(""),
    "lost": play([delta("a"), OutputFinished(0, FinishReason.ERROR, error=LOST)]),
    "refused late": play([delta("a"), UnavailableError("the scheduler is lost")]),
    "a bug": play([delta("a"), ZeroDivisionError()]),
}


def http_messages(data: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """Return the status, headers and body of each message; fails on any byte out of place."""
    messages = []
    while data:
        head, separator, data = data.partition(b"\r\n\r\n")
        assert separator, f"a head without end: {head!r}"
        first, *lines = head.decode("ascii").split("\r\n")
        version, status, _ = first.split(" ", 2)
        assert version in ("HTTP/1.1", "HTTP/1.0"), first
        headers = dict(line.split(": ", 1) for line in lines)
        if headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while True:
                size, separator, data = data.partition(b"\r\n")
                assert separator, "the last chunk is missing"
                assert size == b"%x" % int(size, 16), size
                chunk, end, data = data[: int(size, 16)], data[int(size, 16) :][:2], data[
                    int(size, 16) + 2 :
                ]  # fmt: skip
                assert end == b"\r\n", chunk + end
                body += chunk
                if size == b"0":
                    break
        elif "Content-Length" in headers:
            length = int(headers["Content-Length"])
            assert len(data) >= length
            body, data = data[:length], data[length:]
        else:
            assert headers.get("Connection") == "close" or version == "HTTP/1.0"
            body, data = data, b""
        messages.append((int(status), headers, body))
    return messages


def request(method, path, body=None, version="1.1", **headers) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/{version}", "Host: quire.test"]
    if content:
        lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + content


async def exchange(address, *requests: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """Send requests at once, the last with `Connection: close`; return the bytes received."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"".join(requests))
    data = await reader.read()
    writer.close()
    return http_messages(data)


async def listen(app):
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, runner.addresses[0]


@pytest.fixture
async def inference():
    return FakeInference()


@pytest.fixture
async def address(inference):
    app = web.Application()
    app.add_routes(routes(FakeCells(inference), FakeAdapters(), max_body_bytes=2**20))
    runner, address = await listen(app)
    yield address
    await runner.cleanup()


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("path", CALLS)
async def test_pipelined_streams_are_whole_messages(address, inference, path, script):
    inference.script = SCRIPTS[script]
    body = CALLS[path] | {"stream": True}
    answers = await exchange(
        address,
        request("POST", path, body),
        request("POST", path, body),
        request("POST", path, body, Connection="close"),
    )
    assert [status for status, _, _ in answers] == [200] * 3
    for _, headers, text in answers:
        assert headers["Transfer-Encoding"] == "chunked"
        assert text.endswith(b"\n\n")
    assert "Connection" not in answers[0][1]
    assert answers[-1][1]["Connection"] == "close"


@pytest.mark.parametrize("path", CALLS)
async def test_a_stream_for_http_1_0_ends_with_its_connection(address, path):
    body = CALLS[path] | {"stream": True}
    ((status, headers, text),) = await exchange(address, request("POST", path, body, "1.0"))
    assert status == 200
    assert "Transfer-Encoding" not in headers
    assert text.endswith(b"\n\n")


async def test_an_error_behind_the_head_of_a_stream_is_no_second_head():
    """A client that gets no error must at least see that its body is cut off."""

    async def handle(request, _):
        sse = SseResponse(request, {})
        await sse.start(b":\n\n")
        raise UnavailableError("no scheduler is there")

    app = web.Application()
    app.add_routes([web.get("/", endpoint(handle))])
    runner, (host, port) = await listen(app)
    try:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(request("GET", "/"))
        data = await reader.read()
        writer.close()
        assert data.endswith(b"\r\n\r\n3\r\n:\n\n\r\n")
        # If a second head follows, aiohttp's client waits for ever, in spite of its timeouts.
        async with (
            asyncio.timeout(20),
            aiohttp.ClientSession() as session,
            session.get(f"http://{host}:{port}/") as response,
        ):
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
    finally:
        await runner.cleanup()


async def test_an_empty_event_does_not_end_a_stream():
    async def handle(request, _):
        sse = SseResponse(request, {})
        await sse.start()
        await sse.send_named([])
        await sse.send({"a": 1})
        await sse.end()
        return sse.response

    app = web.Application()
    app.add_routes([web.get("/", endpoint(handle))])
    runner, address = await listen(app)
    try:
        ((_, _, text),) = await exchange(address, request("GET", "/", Connection="close"))
        assert text == b'data: {"a":1}\n\n'
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_tokens_that_make_no_event_do_not_wait_for_the_status(
    address, inference, monkeypatch, path
):
    """Such as the beginning of a call. The first event is sent as soon as there is one."""
    monkeypatch.setattr(streaming, "STATUS_WITHIN_S", 10**6)
    inference.script = spell("")
    body = CALLS[path] | {"stream": True}
    ((status, _, _),) = await exchange(address, request("POST", path, body, Connection="close"))
    assert status == 200


# --- kept streams -------------------------------------------------------------------------------


@pytest.fixture
async def keeping(router, tmp_path):
    """A router that keeps turns."""
    turns = Turns(
        TurnStore(open_database(str(tmp_path / "turns.sqlite")), "a"),
        router.cells,
        router.usage,
        retention_s=60,
        usage_retention_s=60,
        tick_s=0.02,
    )
    app = web.Application()
    app.add_routes(routes(router.cells, None, max_body_bytes=2**20, turns=turns))
    runner, address = await listen(app)
    writing = asyncio.create_task(turns.run())
    yield address
    await runner.cleanup()
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    await turns.close()


async def kept(address) -> str:
    """Begin a response, and return its path."""
    body = {"input": "Say", "background": True, "max_output_tokens": 9}
    ((_, _, text),) = await exchange(
        address, request("POST", "/v1/responses", body, Connection="close")
    )
    return f"/v1/responses/{json.loads(text)['id']}"


@pytest.mark.parametrize("end", ["whole", "failed", "cancelled", "deleted"])
async def test_a_kept_stream_is_a_whole_message_however_it_ends(router, keeping, end):
    path = await kept(keeping)
    submit = await router.scheduler.submits.get()
    key = submit.first_seq_key
    reader, writer = await asyncio.open_connection(*keeping)
    writer.write(request("GET", f"{path}?stream=true", Connection="close"))
    data = await reader.readuntil(b"response.in_progress")
    await router.scheduler.step({key: router.tokens("one two")})
    data += await reader.readuntil(b"response.output_text.delta")
    match end:
        case "whole":
            await router.scheduler.step(finished={key: LENGTH})
        case "failed":
            error = common_pb2.OutputError(code=13, message="NaN")
            await router.scheduler.step(finished={key: ERROR}, error=error)
        case "cancelled":
            await exchange(keeping, request("POST", f"{path}/cancel", Connection="close"))
        case "deleted":
            await exchange(keeping, request("DELETE", path, Connection="close"))
    data += await reader.read()
    writer.close()
    ((status, _, text),) = http_messages(data)
    assert status == 200
    *_, last = text.decode().rstrip().split("\n\n")
    names = {"whole": "incomplete", "failed": "failed", "cancelled": "incomplete"}
    assert last.startswith(f"event: response.{names.get(end, 'incomplete')}\n")


async def test_a_kept_stream_that_is_asked_for_by_head_has_no_body(router, keeping):
    """A client would read the bytes of a body as the head of the next answer."""
    path = await kept(keeping)
    await router.scheduler.submits.get()
    reader, writer = await asyncio.open_connection(*keeping)
    writer.write(request("HEAD", f"{path}?stream=true"))
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404 ")
    writer.write(request("GET", "/v1/models", Connection="close"))
    ((status, _, _),) = http_messages(await reader.read())
    writer.close()
    assert status == 200


async def test_a_stream_that_cannot_be_made_is_refused_before_its_head(
    router, keeping, monkeypatch
):
    """Such as at a router that has just started and knows no model yet."""
    path = await kept(keeping)
    await router.scheduler.submits.get()

    def unknown(name=""):
        del name
        raise UnavailableError("no scheduler is there")

    monkeypatch.setattr(router.inference.model, "info", unknown)
    ((status, _, _),) = await exchange(
        keeping, request("GET", f"{path}?stream=true", Connection="close")
    )
    assert status == 503
