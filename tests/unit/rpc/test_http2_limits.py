"""What clients of `rpc.http2` may not do, by clients that speak HTTP/2 frame by frame."""

import asyncio
import contextlib
import gc
import weakref
import zlib
from dataclasses import replace

import grpc
import h2.config
import h2.connection
import h2.events
import pytest
from h2.errors import ErrorCodes
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from rpc.http2 import connection as connection_module
from rpc.http2 import inbox as inbox_module
from rpc.http2.inbox import WINDOW_BYTES
from rpc.http2.limits import ConnectionLimits, FrameBudget
from rpc.http2.server import Http2Server
from rpc.transport import Pings

MAX_BYTES = 200_000
LIMITS = ConnectionLimits(
    max_received_bytes=MAX_BYTES,
    max_sent_bytes=MAX_BYTES,
    max_metadata_bytes=4096,
    max_concurrent_streams=8,
    accepts_compressed=True,
)
HEADERS = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test/Echo"),
    (":authority", "x"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)


def framed(message, flag=0):
    return bytes([flag]) + len(message).to_bytes(4, "big") + message


HELLO = framed(b"hello")


class Client:
    """A client's connection, whose frames a test makes."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(
                header_encoding="utf-8",
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self.h2.initiate_connection()
        self.events = []
        self.is_closed = False

    def send(self, frames=b""):
        self.writer.write(self.h2.data_to_send() + frames)

    def call(self, stream_id, headers=HEADERS, body=HELLO, *, end=True):
        self.h2.send_headers(stream_id, headers)
        if body or end:
            self.h2.send_data(stream_id, body, end_stream=end)
        self.send()

    async def event(self, kind, stream_id=None):
        """Return the next event of a kind; the events before it are kept."""
        async with asyncio.timeout(20):
            while True:
                for event in self.events:
                    of_stream = getattr(event, "stream_id", None)
                    if isinstance(event, kind) and stream_id in (None, of_stream):
                        self.events.remove(event)
                        return event
                assert not self.is_closed, f"closed before {kind.__name__}"
                await self.receive()

    async def receive(self):
        try:
            data = await self.reader.read(65_536)
        except OSError:  # the server has closed while this client wrote
            data = b""
        self.is_closed = not data
        if data:
            self.events += self.h2.receive_data(data)
            with contextlib.suppress(OSError):
                self.send()

    async def status(self, stream_id):
        """Return a call's status and its message."""
        while True:
            event = await self.event(h2.events.Event, stream_id)
            if isinstance(event, (h2.events.TrailersReceived, h2.events.ResponseReceived)):
                headers = dict(event.headers)
                if "grpc-status" in headers:
                    return int(headers["grpc-status"]), headers.get("grpc-message", "")
                if headers.get(":status", "200") != "200":
                    return headers[":status"], ""

    async def end(self):
        """Return the error code of the GOAWAY before the connection's end; None: there was none."""
        async with asyncio.timeout(20):
            while not self.is_closed:
                await self.receive()
        codes = [e.error_code for e in self.events if isinstance(e, h2.events.ConnectionTerminated)]
        return codes[0] if codes else None


class Handlers(grpc.GenericRpcHandler, dict):
    """Handlers by the names of their methods; tests add some."""

    def service(self, details):
        return self.get(details.method.removeprefix("/test/"))


@pytest.fixture
def handlers():
    async def echo(request, _context):
        return request

    async def count(request, _context):
        return b"%d" % len(request)

    return Handlers(
        Echo=grpc.unary_unary_rpc_method_handler(echo),
        Count=grpc.unary_unary_rpc_method_handler(count),
    )


@pytest.fixture
async def connect(socket_path, server, handlers):
    server.add_generic_rpc_handlers([handlers])
    server.add_insecure_port(f"unix:{socket_path}")
    await server.start()
    clients = []

    async def connect(*, begins=True):
        client = Client(*await asyncio.open_unix_connection(socket_path))
        clients.append(client)
        if begins:
            client.send()
        return client

    yield connect
    for client in clients:
        client.writer.close()
    async with asyncio.timeout(20):
        await server.stop(0)


@pytest.fixture
def limits():
    return LIMITS


@pytest.fixture
async def server(limits):
    return Http2Server(limits)


async def echoes(client, stream_id):
    client.call(stream_id)
    assert await client.status(stream_id) == (0, "")


# --- requests that are refused --------------------------------------------------------------------


def changed(**changes):
    named = {name.replace("_", "-"): value for name, value in changes.items()}
    headers = {**dict(HEADERS), **named}
    if "method" in headers:
        headers[":method"] = headers.pop("method")
    pseudo = [pair for pair in headers.items() if pair[0].startswith(":")]
    return [*pseudo, *(pair for pair in headers.items() if not pair[0].startswith(":"))]


@pytest.mark.parametrize(
    ("changes", "status", "text"),
    [
        ({"method": "GET"}, "405", ""),
        ({"content_type": "application/json"}, "415", ""),
        ({"grpc_encoding": "br"}, 12, "grpc-encoding is br"),
        ({"grpc_timeout": "1x"}, 13, "grpc-timeout"),
        ({"grpc_timeout": "123456789S"}, 13, "grpc-timeout"),
        ({"grpc_timeout": "99999999H"}, 0, ""),
        ({"x_bin": "*"}, 13, "x-bin"),
        ({"x_space": " a "}, 0, ""),
        ({"x_line": "a\r\nb"}, 13, "x-line"),
        ({"X_UPPER": "a"}, 13, "X-UPPER"),
        ({"x:y": "a"}, 13, "x:y"),
        ({"": "a"}, 13, "''"),
        ({"connection": "close"}, 0, ""),
        ({"x_long": "a" * 4000}, 8, "4096"),
        ({":path": "/test/Nothing"}, 12, "Method not found!"),
        ({":status": "200"}, "400", ""),
        ({"content_length": "3"}, 0, ""),
        ({"content_length": "x"}, 0, ""),
        ({"grpc_encoding": "x" * 3000}, 12, "grpc-encoding is xxx"),
    ],
)
async def test_headers(connect, changes, status, text):
    client = await connect()
    client.call(1, changed(**changes))
    code, message = await client.status(1)
    assert code == status
    assert text in message
    await echoes(client, 3)


@pytest.mark.parametrize("name", [":path", ":method", ":authority"])
async def test_two_headers_of_which_a_proxy_may_have_read_the_other(connect, name):
    client = await connect()
    client.call(1, [(name, "/other"), *HEADERS])
    assert await client.status(1) == ("400", "")
    await echoes(client, 3)


async def test_a_refusal_is_short(connect):
    client = await connect()
    client.call(1, changed(grpc_encoding="x" * 3000))
    assert len((await client.status(1))[1]) < 300


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"", 12, "no request message"),
        (b"\0\0\0", 13, "ends within a message"),
        (framed(b"hello")[:-1], 13, "ends within a message"),
        (framed(b"hello", 1), 13, "compression flag 1"),
        (framed(b"hello", 2), 13, "compression flag 2"),
        (b"\0\xff\xff\xff\xff", 8, f"({2**32 - 1} vs. {MAX_BYTES})"),
    ],
)
async def test_messages(connect, body, status, text):
    client = await connect()
    client.call(1, body=body)
    code, message = await client.status(1)
    assert code == status
    assert text in message
    await echoes(client, 3)


def gzipped(data):
    packer = zlib.compressobj(wbits=31)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (gzipped(bytes(MAX_BYTES)), 0, ""),
        (gzipped(bytes(MAX_BYTES + 1)), 8, f"vs. {MAX_BYTES}"),
        (gzipped(bytes(30 * 2**20)), 8, f"vs. {MAX_BYTES}"),
        (gzipped(b"hello")[:-9], 13, "ends within its gzip"),
        (b"hello", 13, "not gzip"),
    ],
)
async def test_compressed_messages(connect, body, status, text):
    client = await connect()
    headers = changed(**{":path": "/test/Count", "grpc_encoding": "gzip"})
    client.h2.send_headers(1, headers)
    whole = framed(body, 1)
    for at in range(0, len(whole), 16_000):
        client.h2.send_data(1, whole[at : at + 16_000], end_stream=at + 16_000 >= len(whole))
    client.send()
    code, message = await client.status(1)
    assert code == status
    assert text in message
    await echoes(client, 3)


@pytest.mark.parametrize("limits", [replace(LIMITS, accepts_compressed=False)])
async def test_compressed_messages_are_refused_by_default(connect):
    client = await connect()
    client.call(1, changed(grpc_encoding="gzip"), framed(gzipped(b"hello"), 1))
    answer = dict((await client.event(h2.events.ResponseReceived, 1)).headers)
    assert answer["grpc-status"] == "12"
    assert answer["grpc-accept-encoding"] == "identity"
    assert "grpc-encoding is gzip; it must be identity or absent" in answer["grpc-message"]
    client.call(3, changed(grpc_encoding="identity"))
    assert await client.status(3) == (0, "")


async def test_headers_of_four_times_the_limit_end_the_connection(connect):
    client = await connect()
    client.call(1, changed(x_long="a" * 16_500))
    assert await client.end() == ErrorCodes.ENHANCE_YOUR_CALM


# --- what a client may send before it is read -----------------------------------------------------


async def test_a_handler_that_does_not_read_stalls_its_stream_only(connect, handlers):
    wanted = asyncio.Event()
    read = []

    async def late(_requests, context):
        await wanted.wait()
        while (request := await context.read()) is not grpc.aio.EOF:
            read.append(len(request))
        return b""

    handlers["Late"] = grpc.stream_unary_rpc_method_handler(late)
    client = await connect()
    client.call(1, changed(**{":path": "/test/Late"}), b"", end=False)
    await echoes(client, 3)
    size = 16_000
    for number in range(5, 45, 2):
        while client.h2.local_flow_control_window(1) >= size + 5:
            client.h2.send_data(1, framed(bytes(size)))
        await echoes(client, number)
        assert client.h2.streams[1].outbound_flow_control_window <= WINDOW_BYTES % (size + 5)
    wanted.set()
    while client.h2.local_flow_control_window(1) < size + 5:
        await client.receive()
    client.h2.end_stream(1)
    client.send()
    assert await client.status(1) == (0, "")
    assert read == [size] * 4


async def test_a_message_larger_than_a_window_is_let_in_when_it_is_wanted(connect):
    client = await connect()
    message = framed(bytes(MAX_BYTES))
    client.h2.send_headers(1, HEADERS)
    at = 0
    while at < len(message):
        room = min(client.h2.local_flow_control_window(1), 16_384, len(message) - at)
        if not room:
            client.send()
            await client.receive()
            continue
        client.h2.send_data(1, message[at : at + room], end_stream=at + room == len(message))
        at += room
    client.h2.increment_flow_control_window(2 * MAX_BYTES)
    client.h2.increment_flow_control_window(2 * MAX_BYTES, 1)
    client.send()
    assert await client.status(1) == (0, "")


async def test_between_two_messages_of_a_stream_the_loop_runs_others(connect, handlers):
    turns = []

    async def count(_requests, context):
        turn = 0

        async def tick():
            nonlocal turn
            while True:
                await asyncio.sleep(0)
                turn += 1

        ticking = asyncio.create_task(tick())
        while await context.read() is not grpc.aio.EOF:
            turns.append(turn)
        ticking.cancel()
        return b""

    handlers["Count"] = grpc.stream_unary_rpc_method_handler(count)
    client = await connect()
    client.call(1, changed(**{":path": "/test/Count"}), framed(b"a") * 100)
    assert await client.status(1) == (0, "")
    assert turns[1:] == list(range(99))


async def test_few_large_messages_come_at_once(connect, monkeypatch):
    monkeypatch.setattr(connection_module, "_LARGE_AT_ONCE", 2)
    client = await connect()
    client.h2.increment_flow_control_window(10 * MAX_BYTES)
    message, numbers = framed(bytes(MAX_BYTES)), (1, 3, 5)
    sent = dict.fromkeys(numbers, 0)
    for number in numbers:
        client.h2.send_headers(number, HEADERS)
        client.h2.increment_flow_control_window(2 * MAX_BYTES, number)

    async def send_up_to(most):
        """Send what there is room for, until the server gives no more."""
        for _ in range(40):
            for number in numbers:
                room = min(client.h2.local_flow_control_window(number), 16_384)
                part = message[sent[number] : min(sent[number] + room, most)]
                if part:
                    sent[number] += len(part)
                    client.h2.send_data(number, part, end_stream=sent[number] == len(message))
            client.h2.ping(bytes(8))
            client.send()
            await client.event(h2.events.PingAckReceived)

    await send_up_to(len(message) - 1)
    assert sorted(sent.values()) == [WINDOW_BYTES, MAX_BYTES + 4, MAX_BYTES + 4]
    await send_up_to(len(message))
    for number in numbers:
        assert await client.status(number) == (0, "")


async def test_a_large_message_that_does_not_come_gives_its_place_away(connect, monkeypatch):
    monkeypatch.setattr(connection_module, "_LARGE_AT_ONCE", 1)
    monkeypatch.setattr(inbox_module, "_LARGE_S", 0.2)
    client = await connect()
    client.h2.increment_flow_control_window(10 * MAX_BYTES)
    for number in (1, 3):
        client.h2.send_headers(number, HEADERS)
        client.h2.send_data(number, framed(bytes(MAX_BYTES))[:10])
    client.send()
    for number in (1, 3):
        code, details = await client.status(number)
        assert (code, "to arrive" in details) == (grpc.StatusCode.DEADLINE_EXCEEDED.value[0], True)
    await echoes(client, 5)


async def test_a_frame_that_is_too_large_is_refused_before_it_is_there(connect):
    client = await connect()
    client.send(b"\1\0\0\0\0\0\0\0\1" + bytes(20_000))  # 65,536 bytes of DATA
    assert await client.end() == ErrorCodes.FRAME_SIZE_ERROR


# --- floods ---------------------------------------------------------------------------------------


def ack():
    return SettingsFrame(0, flags=["ACK"])


@pytest.mark.parametrize(
    "frame",
    [
        PingFrame(0, b"12345678"),
        PingFrame(0, b"12345678", flags=["ACK"]),
        SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 70_000}),
        ack(),
        PriorityFrame(1),
        RstStreamFrame(1),
        WindowUpdateFrame(1, window_increment=1),
        WindowUpdateFrame(0, window_increment=1),
        GoAwayFrame(0),
    ],
    ids=lambda f: f"{type(f).__name__}-{f.stream_id}{'-ack' * ('ACK' in f.flags)}",
)
async def test_frames_without_a_request_or_data(connect, frame):
    client = await connect()
    await echoes(client, 1)
    client.send(frame.serialize() * 3000)
    assert await client.end() in (ErrorCodes.ENHANCE_YOUR_CALM, None)
    await echoes(await connect(), 1)


async def test_empty_data(connect, handlers):
    async def wait(_requests, _context):
        await asyncio.Event().wait()

    handlers["Wait"] = grpc.stream_unary_rpc_method_handler(wait)
    client = await connect()
    client.call(1, changed(**{":path": "/test/Wait"}), b"", end=False)
    client.send(DataFrame(1).serialize() * 3000)
    assert await client.end() in (ErrorCodes.ENHANCE_YOUR_CALM, None)


async def test_calls_that_are_reset_at_once(connect):
    """The attack of CVE-2023-44487."""
    client = await connect()
    with contextlib.suppress(OSError, RuntimeError):  # the latter is uvloop's
        for number in range(3000):
            client.h2.send_headers(2 * number + 1, HEADERS)
            client.h2.reset_stream(2 * number + 1)
            if number % 50 == 0:
                client.send()
                await asyncio.sleep(0)
        client.send()
    assert await client.end() in (ErrorCodes.ENHANCE_YOUR_CALM, None)
    await echoes(await connect(), 1)


async def test_calls_whose_handlers_still_run_count(connect, handlers, limits):
    release, begun = asyncio.Event(), asyncio.Queue()

    async def stubborn(_request, _context):
        begun.put_nowait(None)
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()

    handlers["Stubborn"] = grpc.unary_unary_rpc_method_handler(stubborn)
    client = await connect()
    most = limits.max_concurrent_streams
    for number in range(most):
        client.call(2 * number + 1, changed(**{":path": "/test/Stubborn"}))
    for _ in range(most):
        await begun.get()
    for number in range(most):
        client.h2.reset_stream(2 * number + 1)
    client.call(101, changed(**{":path": "/test/Stubborn"}))
    client.call(103, changed(**{":path": "/test/Nothing"}))
    client.h2.ping(bytes(8))
    client.send()
    await client.event(h2.events.PingAckReceived)
    assert begun.empty()
    release.set()
    assert (await client.status(103))[0] == 12
    await begun.get()


async def test_a_server_that_stops_refuses_calls_that_wait(connect, handlers, server, limits):
    release, begun = asyncio.Event(), asyncio.Queue()

    async def stubborn(_request, _context):
        begun.put_nowait(None)
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()
        return b""

    handlers["Stubborn"] = grpc.unary_unary_rpc_method_handler(stubborn)
    client = await connect()
    numbers = range(1, 2 * limits.max_concurrent_streams + 1, 2)
    for number in numbers:
        client.call(number, changed(**{":path": "/test/Stubborn"}))
    for _ in numbers:
        await begun.get()
    client.h2.reset_stream(1)
    client.call(101)
    client.h2.ping(bytes(8))
    client.send()
    await client.event(h2.events.PingAckReceived)
    stopping = asyncio.create_task(server.stop(1000))
    refused = await client.event(h2.events.StreamReset, 101)
    assert refused.error_code == ErrorCodes.REFUSED_STREAM
    assert not stopping.done()
    release.set()
    await asyncio.wait_for(stopping, 20)


async def test_endless_headers(connect):
    client = await connect()
    client.send(HeadersFrame(1, b"\0").serialize())
    with contextlib.suppress(OSError):
        for _ in range(200):
            client.send(ContinuationFrame(1, bytes(16_000)).serialize())
            await client.writer.drain()
    assert await client.end() in (ErrorCodes.PROTOCOL_ERROR, None)
    await echoes(await connect(), 1)


def test_a_client_earns_frames_by_reading_and_with_time():
    budget = FrameBudget(max_concurrent_streams=10, now=0.0)
    assert budget.spend(1000, 0.0)
    assert budget.spend(10, 0.0)
    assert not budget.spend(1, 0.0)
    budget.earn(6)
    assert budget.spend(5, 0.0)
    assert not budget.spend(1, 0.0)
    assert budget.spend(100, 1.01)
    assert budget.spend(1010, 1000.0)
    assert not budget.spend(1, 1000.0)


# --- connections ----------------------------------------------------------------------------------


async def test_http_1_is_refused(connect):
    client = await connect(begins=False)
    client.writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert await client.end() in (ErrorCodes.PROTOCOL_ERROR, None)


async def test_a_client_that_does_not_begin(connect, monkeypatch):
    monkeypatch.setattr(connection_module, "_PREFACE_S", 0.05)
    client = await connect(begins=False)
    client.writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n")
    assert await client.end() is None


@pytest.mark.parametrize("first", [b"", HELLO, HELLO[:3]])
async def test_a_connection_leaves_no_garbage(connect, server, first):
    """Thousands that end at once would hold the event loop when they are collected."""
    client = await connect()
    if first:
        client.call(1, changed(grpc_timeout="100S"), first)
        await client.status(1)
    client.h2.ping(bytes(8))
    client.send()
    await client.event(h2.events.PingAckReceived)
    (connection,) = server.connections
    closed, kept = connection.closed, weakref.ref(connection)
    del connection
    gc.disable()
    try:
        client.writer.close()
        await asyncio.wait_for(closed, 20)
        del closed
        for _ in range(5):
            await asyncio.sleep(0)
        assert kept() is None
    finally:
        gc.enable()


class TestConnections:
    @pytest.fixture
    def limits(self):
        return replace(LIMITS, max_connections=1)

    async def test_too_many(self, connect):
        first = await connect()
        await echoes(first, 1)
        assert await (await connect()).end() is None
        await echoes(first, 3)
        first.writer.close()
        while True:
            client = await connect()
            with contextlib.suppress(AssertionError, OSError):
                await echoes(client, 1)
                return


class TestPings:
    @pytest.fixture
    def limits(self):
        return replace(LIMITS, pings=Pings(after_ms=20, timeout_ms=20_000, are_sent_idly=True))

    async def test_a_client_that_answers(self, connect):
        client = await connect()
        for _ in range(4):
            await client.event(h2.events.PingReceived)
        await echoes(client, 1)


class TestUnansweredPings:
    @pytest.fixture
    def limits(self):
        return replace(LIMITS, pings=Pings(after_ms=20, timeout_ms=20, are_sent_idly=True))

    async def test_a_client_that_does_not_answer(self, connect, handlers):
        ended = asyncio.Event()

        async def wait(_requests, _context):
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        handlers["Wait"] = grpc.stream_unary_rpc_method_handler(wait)
        client = await connect(begins=False)
        client.h2.send_headers(1, changed(**{":path": "/test/Wait"}))
        client.send()
        async with asyncio.timeout(20):
            while await client.reader.read(1000):
                pass
            await ended.wait()


async def test_a_client_that_says_goaway_gets_its_responses(connect, handlers):
    release = asyncio.Event()

    async def wait(request, _context):
        await release.wait()
        return request

    handlers["Wait"] = grpc.unary_unary_rpc_method_handler(wait)
    client = await connect()
    client.call(1, changed(**{":path": "/test/Wait"}))
    client.send(GoAwayFrame(0).serialize())
    client.send(WindowUpdateFrame(0, window_increment=5).serialize())
    release.set()
    assert await client.status(1) == (0, "")


async def test_a_stream_that_goes_on_after_its_status_is_reset(connect):
    client = await connect()
    client.call(1, changed(**{":path": "/test/Nothing"}), b"", end=False)
    assert (await client.status(1))[0] == 12
    reset = await client.event(h2.events.StreamReset, 1)
    assert reset.error_code == ErrorCodes.NO_ERROR
    await echoes(client, 3)
