"""Calls of `rpc.http2` by the clients of grpcio: each kind of call, and each end of one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from rpc.http2.limits import ConnectionLimits
from rpc.http2.server import Http2Server

MIB = 2**20
EOF = grpc.aio.EOF
LIMITS = ConnectionLimits(
    max_received_bytes=8 * MIB,
    max_sent_bytes=8 * MIB,
    max_metadata_bytes=16 * 1024,
    max_concurrent_streams=4096,
    accepts_compressed=True,
)


class Methods(grpc.GenericRpcHandler):
    """Serves `/m` by the kind of call and function that a test sets."""

    def __init__(self) -> None:
        self.handler: Any = None
        self.seen: list[Any] = []

    def service(self, details: Any) -> Any:
        self.seen.append((details.method, details.invocation_metadata))
        return self.handler if details.method == "/m" else None


@contextlib.asynccontextmanager
async def serving(
    methods: Methods, address: str, limits: ConnectionLimits = LIMITS, **options: Any
) -> AsyncIterator[str]:
    server = Http2Server(limits, **options)
    server.add_generic_rpc_handlers([methods])
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield address.replace(":0", f":{port}")
    finally:
        async with asyncio.timeout(20):
            await server.stop(0)


@pytest.fixture
def methods() -> Methods:
    return Methods()


@pytest.fixture(params=["tcp", "unix"])
async def channel(request, methods, socket_path) -> AsyncIterator[grpc.aio.Channel]:
    address = "127.0.0.1:0" if request.param == "tcp" else f"unix:{socket_path}"
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with (
        serving(methods, address) as target,
        grpc.aio.insecure_channel(target, options=options) as channel,
    ):
        yield channel


async def failed(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


# --- kinds of calls ---------------------------------------------------------------------------


async def test_unary(channel, methods):
    async def reverse(request, _context):
        return request[::-1]

    methods.handler = grpc.unary_unary_rpc_method_handler(reverse)
    for size in (0, 1, 70_000, 5 * MIB):
        message = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
        assert await channel.unary_unary("/m")(message, timeout=20) == message[::-1]


async def test_a_stream_of_responses_by_write_and_by_yield(channel, methods):
    async def write(request, context):
        for i in range(300):
            await context.write(request + b"%d" % i)

    async def generate(request, _context):
        for i in range(300):
            yield request + b"%d" % i

    for function in (write, generate):
        methods.handler = grpc.unary_stream_rpc_method_handler(function)
        got = [each async for each in channel.unary_stream("/m")(b"n", timeout=20)]
        assert got == [b"n%d" % i for i in range(300)]


async def test_a_stream_of_requests(channel, methods):
    async def join(requests, _context):
        return b"".join([each async for each in requests])

    methods.handler = grpc.stream_unary_rpc_method_handler(join)
    parts = [bytes([i]) * 1000 for i in range(200)]
    assert await channel.stream_unary("/m")(iter(parts), timeout=20) == b"".join(parts)


async def test_a_conversation_with_large_messages(channel, methods):
    async def echo(_requests, context):
        while (request := await context.read()) is not EOF:
            await context.write(request)

    methods.handler = grpc.stream_stream_rpc_method_handler(echo)
    call = channel.stream_stream("/m")(timeout=30)
    for size in (10, 3 * MIB, 0, 200_000):
        await call.write(b"z" * size)
        assert await call.read() == b"z" * size
    await call.done_writing()
    assert await call.read() is EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_many_calls_on_one_connection(channel, methods):
    tick, begun = asyncio.Event(), asyncio.Queue()

    async def count(_request, context):
        begun.put_nowait(None)
        await tick.wait()
        for i in range(20):
            await context.write(b"%d" % i)

    methods.handler = grpc.unary_stream_rpc_method_handler(count)

    async def read() -> list[bytes]:
        call = channel.unary_stream("/m")(b"", timeout=30)
        return [each async for each in call]

    reading = [asyncio.create_task(read()) for _ in range(200)]
    for _ in reading:
        await begun.get()
    tick.set()
    for got in await asyncio.gather(*reading):
        assert got == [b"%d" % i for i in range(20)]


async def test_messages_are_parsed_and_serialized(channel, methods):
    async def double(request, _context):
        return 2 * request

    methods.handler = grpc.unary_unary_rpc_method_handler(
        double, request_deserializer=int, response_serializer=lambda n: b"%d" % n
    )
    assert await channel.unary_unary("/m")(b"21") == b"42"


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_requests(channel, methods, compression):
    async def length(request, _context):
        return b"%d" % len(request)

    methods.handler = grpc.unary_unary_rpc_method_handler(length)
    for size in (100_000, 3 * MIB):
        answer = await channel.unary_unary("/m")(bytes(size), compression=compression)
        assert answer == b"%d" % size
    error = await failed(channel.unary_unary("/m")(bytes(9 * MIB), compression=compression))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(8 * MIB) in error.details()


# --- metadata and the context ---------------------------------------------------------------------


async def test_metadata_both_ways(channel, methods):
    async def answer(_request, context):
        context.set_trailing_metadata((("last", "a, b"), ("last-bin", b"\0\xff" * 150)))
        return repr(context.invocation_metadata()).encode()

    methods.handler = grpc.unary_unary_rpc_method_handler(answer)
    sent = (("x-text", "a b~"), ("x-bin", b"\0\x01\xff"), ("x-text", "second"))
    call = channel.unary_unary("/m")(b"", metadata=sent)
    received = eval(await call)
    assert sorted(pair for pair in received if pair[0].startswith("x-")) == sorted(sent)
    assert not {"te", "content-type", ":path", "grpc-timeout"} & {key for key, _ in received}
    last = dict(await call.trailing_metadata())
    assert (last["last"], last["last-bin"]) == ("a, b", b"\0\xff" * 150)


async def test_what_handlers_know(channel, methods):
    ended = asyncio.Event()

    async def tell(_request, context):
        context.add_done_callback(lambda it: ended.set() if it is context else None)
        assert context.auth_context() == {}
        assert not context.done()
        assert not context.cancelled()
        return f"{context.peer()} {context.time_remaining()}".encode()

    methods.handler = grpc.unary_unary_rpc_method_handler(tell)
    peer, remaining = (await channel.unary_unary("/m")(b"")).decode().split()
    assert remaining == "None"
    assert peer == "unix:" or peer.startswith("ipv4:127.0.0.1:")
    _, remaining = (await channel.unary_unary("/m")(b"", timeout=1000)).decode().split()
    assert 900 < float(remaining) < 1100  # gRPC rounds it
    await ended.wait()


# --- ends of calls --------------------------------------------------------------------------------


async def test_abort(channel, methods):
    after = []

    async def abort(_request, context):
        await context.write(b"one")
        try:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, "no “such” thing: 100%\n", (("why-bin", b"\x80"),)
            )
        finally:
            after.append(True)

    methods.handler = grpc.unary_stream_rpc_method_handler(abort)
    call = channel.unary_stream("/m")(b"")
    assert await call.read() == b"one"
    error = await failed(call.read())
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert error.details() == "no “such” thing: 100%\n"
    assert dict(error.trailing_metadata())["why-bin"] == b"\x80"
    assert after == [True]


async def test_a_code_that_is_set_and_an_error(channel, methods):
    async def set_code(_request, context):
        context.set_code(grpc.StatusCode.DATA_LOSS)
        context.set_details("gone")
        return b"unsent"

    async def fail(_request, _context):
        raise LookupError("oops")

    methods.handler = grpc.unary_unary_rpc_method_handler(set_code)
    error = await failed(channel.unary_unary("/m")(b""))
    assert (error.code(), error.details()) == (grpc.StatusCode.DATA_LOSS, "gone")
    methods.handler = grpc.unary_unary_rpc_method_handler(fail)
    error = await failed(channel.unary_unary("/m")(b""))
    assert error.code() is grpc.StatusCode.UNKNOWN
    assert "oops" in error.details()


@pytest.mark.parametrize("metadata", [("Upper", "a"), ("x", "a\nb"), ("grpc-status", "0")])
async def test_metadata_that_cannot_be_sent_is_an_error_of_the_handler(channel, methods, metadata):
    async def fail(_request, context):
        await context.abort(grpc.StatusCode.NOT_FOUND, "", (metadata,))

    methods.handler = grpc.unary_unary_rpc_method_handler(fail)
    error = await failed(channel.unary_unary("/m")(b"", timeout=20))
    assert error.code() is grpc.StatusCode.UNKNOWN
    assert metadata[0] in error.details()


async def test_a_response_that_is_too_large(channel, methods):
    async def answer(_request, _context):
        return bytes(8 * MIB + 1)

    methods.handler = grpc.unary_unary_rpc_method_handler(answer)
    error = await failed(channel.unary_unary("/m")(b"", timeout=20))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(8 * MIB) in error.details()


@pytest.mark.parametrize("fails", [False, True])
async def test_responses_that_wait_for_the_client_come_before_the_status(channel, methods, fails):
    async def answer(_request, context):
        for number in range(8):
            context.put(bytes([number]) * 4 * MIB)
        if fails:
            await context.abort(grpc.StatusCode.DATA_LOSS, "gone")

    methods.handler = grpc.unary_stream_rpc_method_handler(answer)
    call = channel.unary_stream("/m")(b"", timeout=20)
    for number in range(8):
        assert await call.read() == bytes([number]) * 4 * MIB
    assert await call.code() is (grpc.StatusCode.DATA_LOSS if fails else grpc.StatusCode.OK)


async def test_an_unknown_method_and_a_call_without_a_message(channel, methods):
    error = await failed(channel.unary_unary("/nothing")(b""))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert error.details() == "Method not found!"

    async def never(_request, _context):
        raise AssertionError

    methods.handler = grpc.unary_unary_rpc_method_handler(never)
    error = await failed(channel.stream_unary("/m")(iter(())))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


def watched(begun: asyncio.Event, ended: "asyncio.Future[Any]") -> Callable[..., Any]:
    async def hang(_request, context):
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.set_result(context.cancelled())
            raise

    return hang


@pytest.fixture
async def hanging(methods):
    begun, ended = asyncio.Event(), asyncio.get_running_loop().create_future()
    methods.handler = grpc.unary_stream_rpc_method_handler(watched(begun, ended))
    return begun, ended


async def test_a_client_that_cancels(channel, hanging):
    begun, ended = hanging
    call = channel.unary_stream("/m")(b"")
    await begun.wait()
    call.cancel()
    assert await asyncio.wait_for(ended, 20) is True


async def test_a_client_that_is_lost(methods, hanging, socket_path):
    begun, ended = hanging
    async with serving(methods, f"unix:{socket_path}") as target:
        channel = grpc.aio.insecure_channel(target)
        call = channel.unary_stream("/m")(b"")
        await begun.wait()
        await channel.close()
        assert await asyncio.wait_for(ended, 20) is True
        del call


async def test_a_deadline(channel, hanging):
    _, ended = hanging
    error = await failed(channel.unary_stream("/m")(b"", timeout=0.2).read())
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(ended, 20)


async def test_a_handler_that_ignores_its_cancellation_may_not_write(channel, methods):
    begun, result = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def stubborn(_request, context):
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            for use in (lambda: context.write(b"late"), context.read):
                with pytest.raises(asyncio.CancelledError):
                    await use()
            result.set_result(True)

    methods.handler = grpc.unary_stream_rpc_method_handler(stubborn)
    call = channel.unary_stream("/m")(b"")
    await begun.wait()
    call.cancel()
    assert await asyncio.wait_for(result, 20)


async def test_a_client_that_does_not_read_holds_nobody_else(channel, methods):
    num_written = 0

    async def flood(_request, context):
        nonlocal num_written
        while True:
            await context.write(bytes(10_000))
            num_written += 1

    async def answer(_request, _context):
        return b"here"

    methods.handler = grpc.unary_stream_rpc_method_handler(flood)
    stalled = channel.unary_stream("/m")(b"")
    assert await stalled.read()
    methods.handler = grpc.unary_unary_rpc_method_handler(answer)
    before = -1
    while before < num_written:  # until the window is used up
        before = num_written
        for _ in range(20):
            assert await channel.unary_unary("/m")(b"", timeout=20) == b"here"
    for _ in range(2 * num_written):  # what was held back comes as soon as it is read
        assert len(await stalled.read()) == 10_000
    stalled.cancel()


# --- the server -----------------------------------------------------------------------------------


async def test_interceptors_come_in_order(methods, socket_path):
    order = []

    class Noting(grpc.aio.ServerInterceptor):
        def __init__(self, name):
            self.name = name

        async def intercept_service(self, continuation, details):
            order.append((self.name, details.method))
            return await continuation(details)

    async def answer(_request, _context):
        return b""

    methods.handler = grpc.unary_unary_rpc_method_handler(answer)
    chain = [Noting("outer"), Noting("inner")]
    async with (
        serving(methods, f"unix:{socket_path}", interceptors=chain) as target,
        grpc.aio.insecure_channel(target) as channel,
    ):
        await channel.unary_unary("/m")(b"")
    assert order == [("outer", "/m"), ("inner", "/m")]


async def test_a_stop_lets_calls_end_and_cuts_the_rest(methods, socket_path):
    begun = [asyncio.Event(), asyncio.Event()]
    release = asyncio.Event()

    async def wait(request, _context):
        number = int(request)
        begun[number].set()
        await (release if number == 0 else asyncio.Event()).wait()
        return b"done"

    methods.handler = grpc.unary_unary_rpc_method_handler(wait)
    server = Http2Server(LIMITS)
    server.add_generic_rpc_handlers([methods])
    server.add_insecure_port(f"unix:{socket_path}")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{socket_path}") as channel:
        calls = [channel.unary_unary("/m")(b"%d" % i) for i in range(2)]
        for each in begun:
            await each.wait()
        stopping = asyncio.create_task(server.stop(1000))
        await asyncio.sleep(0)
        assert not socket_path.exists()
        late = await failed(channel.unary_unary("/m")(b"0", timeout=20))
        assert late.code() is grpc.StatusCode.UNAVAILABLE
        release.set()
        assert await calls[0] == b"done"
        assert not stopping.done()
        async with asyncio.timeout(20):
            await server.stop(0)
            await stopping
        assert (await failed(calls[1])).code() is grpc.StatusCode.UNAVAILABLE


async def test_ports(methods, socket_path):
    async def tell(_request, context):
        return context.peer().encode()

    methods.handler = grpc.unary_unary_rpc_method_handler(tell)
    server = Http2Server(LIMITS, shares_port=True)
    server.add_generic_rpc_handlers([methods])
    port = server.add_insecure_port("0.0.0.0:0")
    server.add_insecure_port(f"unix:{socket_path}")
    await server.start()
    other = Http2Server(LIMITS, shares_port=True)
    assert other.add_insecure_port(f"0.0.0.0:{port}") == port
    await other.stop(0)
    with pytest.raises(OSError, match="in use"):
        Http2Server(LIMITS).add_insecure_port(f"0.0.0.0:{port}")
    for target, peer in (
        (f"ipv4:127.0.0.1:{port}", b"ipv4:127.0.0.1:"),
        (f"ipv6:[::1]:{port}", b"ipv6:%5B::1%5D:"),
        (f"unix:{socket_path}", b"unix:"),
    ):
        async with grpc.aio.insecure_channel(target) as channel:
            assert (await channel.unary_unary("/m")(b"", timeout=20)).startswith(peer)
    await server.stop(0)
    assert not socket_path.exists()
