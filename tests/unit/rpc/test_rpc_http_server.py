"""Bytes that are no HTTP get OpenAI's error; connections beyond `ulimit -n` are refused."""

import asyncio
import contextlib
import json
import logging
import resource
import subprocess
import sys

import aiohttp
import grpc
import grpc.aio
import pytest
from aiohttp import web
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc import file_limit, grpc_server, http_server
from rpc.file_limit import max_connections, raise_file_limit
from rpc.settings import ProcessSettings


async def sent(address, data):
    """The answer to these bytes, until the connection ends."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    answer = await reader.read()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return answer


async def _echo(request: web.Request) -> web.Response:
    return web.Response(body=await request.read())


@pytest.fixture
def app():
    app = web.Application()
    app.router.add_post("/echo", _echo)
    return app


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9.9\r\n\r\n",
        b"G\x00T / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"a" * 20_000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_answered_in_openais_shape(run_server, app, caplog, data):
    caplog.set_level(logging.DEBUG)
    num_malformed = http_server.MALFORMED._value.get()
    async with run_server(ProcessSettings(), http=app) as addresses:
        answer = await sent(addresses.http, data)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 ")), answer
    assert b"Content-Type: application/json" in head
    error = json.loads(body)["error"]
    assert error["message"].startswith("the HTTP request is malformed: ")
    assert len(error["message"]) < 300
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, None)
    assert http_server.MALFORMED._value.get() == num_malformed + 1
    assert not [record for record in caplog.records if record.exc_info]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_bug_below_all_routes_is_still_logged(run_server, caplog):
    async def fail(_request):
        raise RuntimeError("a bug")

    app = web.Application()
    app.router.add_get("/bug", fail)
    async with (
        run_server(ProcessSettings(), http=app) as addresses,
        aiohttp.ClientSession() as session,
        session.get(f"http://{addresses.http}/bug") as response,
    ):
        assert response.status == 500
    assert [record for record in caplog.records if record.exc_info]


async def test_a_body_reaches_its_route_as_it_was_sent(run_server, app):
    data = b"\x1f\x8b no gzip"
    async with (
        run_server(ProcessSettings(), http=app) as addresses,
        aiohttp.ClientSession() as session,
        session.post(
            f"http://{addresses.http}/echo", data=data, headers={"Content-Encoding": "gzip"}
        ) as response,
    ):
        assert await response.read() == data


# --- open files -----------------------------------------------------------------------------------


async def test_connections_beyond_the_limit_are_closed_at_once(run_server, monkeypatch):
    monkeypatch.setattr(http_server, "max_connections", lambda: 2)
    async with run_server(ProcessSettings()) as addresses, contextlib.AsyncExitStack() as stack:
        host, _, port = addresses.http.rpartition(":")
        kept = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            kept.append((reader, writer))
        assert await sent(addresses.http, b"GET /health HTTP/1.1\r\n\r\n") == b""
        reader, writer = kept[0]
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        answer = await sent(
            addresses.http, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )
        assert answer.startswith(b"HTTP/1.1 200 "), "one has ended"


@pytest.mark.parametrize("uds", [False, True])
async def test_grpc_connections_beyond_the_limit_are_refused(
    run_server, settings, monkeypatch, uds
):
    monkeypatch.setattr(grpc_server, "max_connections", lambda: 2)
    async with (
        run_server(settings if uds else ProcessSettings()) as addresses,
        contextlib.AsyncExitStack() as stack,
    ):

        async def check():
            channel = grpc.aio.insecure_channel(
                addresses.grpc, options=[("grpc.use_local_subchannel_pool", 1)]
            )
            stack.push_async_callback(channel.close)
            return await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=20
            )

        for _ in range(2):
            assert await check()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("soft", "expected"),
    [(1024, 448), (100_000, 49_936), (64, 16), (1, 1), (resource.RLIM_INFINITY, None)],
)
def test_connections_leave_room_for_other_files(monkeypatch, soft, expected):
    monkeypatch.setattr(file_limit.resource, "getrlimit", lambda _: (soft, soft))
    assert max_connections() == expected


def test_the_soft_limit_is_raised_to_the_hard_one():
    program = (
        "import resource; from rpc.file_limit import raise_file_limit;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300)); raise_file_limit();"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "300\n"


def test_a_hard_limit_above_the_systems_is_left_alone(monkeypatch):
    def refuse(*_):
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(file_limit.resource, "setrlimit", refuse)
    raise_file_limit()
