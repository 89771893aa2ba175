"""Start, drain and stop of a process's servers; signals are sent to real processes."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys

import aiohttp
import grpc
import grpc.aio
import pytest
from aiohttp import web
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from h2.config import H2Configuration
from h2.connection import H2Connection

from rpc.health import Health
from rpc.peers.channel import open_channel
from rpc.server import CannotListenError, Service, serve
from rpc.settings import ProcessSettings

METHOD = "/quire.test.Slow/Call"


@pytest.fixture(params=[True, False], ids=["grpcio", "quire"])
def by_grpcio(request):
    return request.param


def slow_service(entered, release):
    async def call(_request, _context):
        entered.set()
        await release.wait()
        return b"done"

    generic = grpc.method_handlers_generic_handler(
        "quire.test.Slow", {"Call": grpc.unary_unary_rpc_method_handler(call)}
    )
    return Service("quire.test.Slow", lambda server: server.add_generic_rpc_handlers((generic,)))


async def test_reflection_lists_the_services(run_server, settings):
    service = slow_service(asyncio.Event(), asyncio.Event())
    async with (
        run_server(settings, services=[service]) as addresses,
        open_channel(addresses.grpc) as channel,
    ):
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        names = {listed.name for listed in (await call.read()).list_services_response.service}
    assert names == {
        "quire.test.Slow",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "quire.v1.AdminService",
    }


async def test_port_0_is_replaced_by_the_one_bound(run_server):
    async with run_server(ProcessSettings()) as addresses:
        for address in (addresses.grpc, addresses.http):
            host, port = address.split(":")
            assert host == "127.0.0.1"
            assert int(port) > 0
        async with open_channel(addresses.grpc) as channel:
            async with asyncio.timeout(10):
                await channel.channel_ready()


async def test_the_drain_is_not_ready_then_on_drain_then_stop(run_server, settings):
    events = []
    entered, release, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
    health = Health()
    health.set_ready()
    health.on_change(lambda: events.append(health.status))

    async def on_drain():
        events.append("on_drain")
        # Probes must still get an answer: 503.
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://{addresses.http}/ready") as response,
        ):
            events.append(response.status)
        release.set()
        events.append(await call)

    async with (
        run_server(
            settings,
            health=health,
            services=[slow_service(entered, release)],
            on_drain=on_drain,
            stop=stop,
        ) as addresses,
        open_channel(addresses.grpc) as channel,
    ):
        call = channel.unary_unary(METHOD)(b"")
        await entered.wait()
        stop.set()
        assert await call == b"done"
    assert events == ["draining", "on_drain", 503, b"done"]
    with pytest.raises(aiohttp.ClientConnectionError):
        async with aiohttp.ClientSession() as session:
            await session.get(f"http://{addresses.http}/health")


async def test_without_on_drain_live_calls_finish_and_new_ones_are_refused(run_server, settings):
    entered, release, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
    draining = asyncio.Event()
    health = Health()
    health.on_change(draining.set)
    async with (
        run_server(
            settings, health=health, services=[slow_service(entered, release)], stop=stop
        ) as addresses,
        open_channel(addresses.grpc) as channel,
    ):
        live = channel.unary_unary(METHOD)(b"")
        await entered.wait()
        stop.set()
        await draining.wait()
        release.set()
        assert await live == b"done"
    async with open_channel(addresses.grpc) as late:
        with pytest.raises(grpc.aio.AioRpcError) as it:
            await late.unary_unary(METHOD)(b"")
        assert it.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("failing", [False, True])
async def test_a_drain_that_hangs_or_fails_does_not_keep_the_process(run_server, failing):
    cut_off = []

    async def on_drain():
        if failing:
            raise RuntimeError("a bug")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cut_off.append(True)
            raise

    async with asyncio.timeout(10):
        async with run_server(ProcessSettings(drain_s=0.01), on_drain=on_drain):
            pass
    assert cut_off == [] if failing else [True]


async def test_a_stop_during_the_start_interrupts_it(settings):
    interrupted = []
    stop = asyncio.Event()

    async def on_started(_addresses):
        stop.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            interrupted.append(True)
            raise

    async with asyncio.timeout(10):
        await serve(settings, health=Health(), services=[], on_started=on_started, stop=stop)
    assert interrupted == [True]


async def test_a_start_that_fails_stops_the_servers_and_says_why(settings):
    seen = []

    async def on_started(addresses):
        seen.append(addresses)
        raise LookupError("no model")

    async with asyncio.timeout(10):
        with pytest.raises(LookupError, match="no model"):
            await serve(settings, health=Health(), services=[], on_started=on_started)
    with pytest.raises(aiohttp.ClientConnectionError):
        async with aiohttp.ClientSession() as session:
            await session.get(f"http://{seen[0].http}/health")


@pytest.mark.parametrize("flag", ["grpc_port", "http_port"])
async def test_a_taken_port_is_named(flag):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CannotListenError, match=f"127.0.0.1:{port}"):
            await serve(ProcessSettings(**{flag: port}), health=Health(), services=[])


async def test_two_servers_cannot_share_a_grpc_port(run_server):
    async with run_server(ProcessSettings()) as addresses:
        port = int(addresses.grpc.split(":")[1])
        with pytest.raises(CannotListenError, match=f"127.0.0.1:{port}"):
            await serve(ProcessSettings(grpc_port=port), health=Health(), services=[])


async def test_a_living_socket_is_not_taken_over(run_server, settings, by_grpcio):
    async with run_server(settings) as addresses:
        for taken in (settings, ProcessSettings(operator_uds=settings.uds)):
            with pytest.raises(CannotListenError, match=str(settings.uds)):
                await serve(taken, health=Health(), services=[], grpc_by_grpcio=by_grpcio)
        async with open_channel(addresses.grpc) as channel, asyncio.timeout(10):
            await channel.channel_ready()


async def test_a_socket_that_accepts_no_client_now_is_not_taken_over(settings, by_grpcio):
    with contextlib.ExitStack() as stack:
        busy = stack.enter_context(socket.socket(socket.AF_UNIX))
        busy.bind(str(settings.uds))
        busy.listen(0)
        is_full = False
        while not is_full:
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            is_full = client.connect_ex(str(settings.uds)) == errno.EAGAIN
        with pytest.raises(CannotListenError, match=str(settings.uds)):
            await serve(settings, health=Health(), services=[], grpc_by_grpcio=by_grpcio)


async def test_a_socket_of_another_kind_is_left_alone(settings, by_grpcio):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(settings.uds))
        with pytest.raises(CannotListenError, match=str(settings.uds)):
            await serve(settings, health=Health(), services=[], grpc_by_grpcio=by_grpcio)
        assert settings.uds.is_socket()


async def test_a_dead_process_s_socket_is_replaced(run_server, settings):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(settings.uds))
    async with (
        run_server(settings) as addresses,
        open_channel(addresses.grpc) as channel,
        asyncio.timeout(10),
    ):
        await channel.channel_ready()


async def test_an_http_client_that_leaves_cancels_its_handler(run_server, settings):
    entered, left = asyncio.Event(), asyncio.Event()

    async def hang(_request):
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            left.set()
            raise

    app = web.Application()
    app.router.add_get("/hang", hang)
    async with run_server(settings, http=app) as addresses:
        host, port = addresses.http.split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /hang HTTP/1.1\r\nHost: x\r\n\r\n")
        await entered.wait()
        writer.close()
        async with asyncio.timeout(10):
            await left.wait()


PROCESS = """
import asyncio, sys
from rpc.health import Health
from rpc.server import run, serve
from rpc.settings import ProcessSettings

async def on_started(addresses):
    print("started", flush=True)

async def on_drain():
    print("draining", flush=True)
    if sys.argv[1] == "hang":
        await asyncio.Event().wait()

settings = ProcessSettings(http_port=int(sys.argv[2]))
run(serve(settings, health=Health(), services=[], on_started=on_started, on_drain=on_drain))
print("ended", flush=True)
"""


@pytest.fixture
def start():
    processes = []

    def start_process(drain="pass", http_port=0):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}
        process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, drain, str(http_port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        processes.append(process)
        return process

    yield start_process
    for process in processes:
        process.kill()
        process.communicate()


def next_word(process):
    """Return the next line of output that is not a log line."""
    for line in process.stdout:
        if line.strip() in ("started", "draining", "ended"):
            return line.strip()
    return None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_in_order(start, number):
    process = start()
    assert next_word(process) == "started"
    process.send_signal(number)
    assert next_word(process) == "draining"
    assert next_word(process) == "ended"
    assert process.wait(30) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_of_a_kind_ends_at_once(start, number):
    process = start("hang")
    assert next_word(process) == "started"
    process.send_signal(number)
    assert next_word(process) == "draining"
    process.send_signal(number)
    assert process.wait(10) == -number


def test_a_taken_port_is_one_line_and_exit_code_1(start):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start(http_port=taken.getsockname()[1])
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "error: HTTP cannot listen on 127.0.0.1:" in stderr
    assert "Traceback" not in stderr


async def test_a_process_ends_when_grpcio_s_server_ends(settings):
    """A call with a path that is not UTF-8 ends it."""
    h2 = H2Connection(H2Configuration(header_encoding=None, validate_outbound_headers=False))
    h2.initiate_connection()
    headers = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x\xff")]
    headers += [(b":authority", b"localhost"), (b"content-type", b"application/grpc")]
    headers.append((b"te", b"trailers"))
    h2.send_headers(1, headers)
    with socket.socket(socket.AF_UNIX) as client:

        async def call(addresses):
            client.connect(addresses.grpc.removeprefix("unix:"))
            client.sendall(h2.data_to_send())

        async with asyncio.timeout(20):
            with pytest.raises(UnicodeDecodeError):
                await serve(settings, health=Health(), services=[], on_started=call)
