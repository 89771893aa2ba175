"""The error table both ways, through a real server, for all four kinds of call."""

import asyncio
import gc
import weakref

import grpc
import grpc.aio
import pytest
import structlog
from google.rpc import error_details_pb2, status_pb2

from contract import errors
from rpc.grpc_server import Service
from rpc.peers.channel import open_channel
from rpc.status import DETAILS_KEY, calling, error_to_status, status_to_error

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")

TABLE = [
    errors.InvalidArgumentError("top_p", "is 2; it must be in (0, 1]"),
    errors.UnauthenticatedError("no API key"),
    errors.NotFoundError("model 'x' is not served"),
    errors.AlreadyExistsError("request 'r' is live"),
    errors.AbortedError("request 'r' was resumed by another call"),
    errors.TooBusyError("256 requests wait; at most 256 may", retry_after_s=2.5),
    errors.UnavailableError("draining"),
    errors.PermissionDeniedError("the key is another tenant's"),
    errors.DeadlineExceededError("0.1 s have passed"),
    errors.FailedPreconditionError("epoch 1 is older than 2"),
    errors.UnimplementedError("beam_width is not supported"),
    errors.QuireError("the worker died"),
]


def faulty_service(fault):
    """One method of each kind; each calls `fault(context)`, streams after one message if `late`."""

    async def unary_unary(_request, context):
        return await fault(context)

    async def unary_stream(request, context):
        if request == b"late":
            yield b"first"
        yield await fault(context)

    async def stream_unary(requests, context):
        async for _ in requests:
            pass
        return await fault(context)

    async def stream_stream(requests, context):
        async for request in requests:
            if request == b"late":
                yield b"first"
            yield await fault(context)

    async def written(_request, context):
        await context.write(b"first")
        await fault(context)

    handlers = {
        "unary_unary": grpc.unary_unary_rpc_method_handler(unary_unary),
        "unary_stream": grpc.unary_stream_rpc_method_handler(unary_stream),
        "stream_unary": grpc.stream_unary_rpc_method_handler(stream_unary),
        "stream_stream": grpc.stream_stream_rpc_method_handler(stream_stream),
        "written": grpc.unary_stream_rpc_method_handler(written),
    }
    generic = grpc.method_handlers_generic_handler("quire.test.Faulty", handlers)
    return Service("quire.test.Faulty", lambda server: server.add_generic_rpc_handlers((generic,)))


async def call(channel, kind, request=b"now"):
    """Return the received messages."""
    method = getattr(channel, kind)(f"/quire.test.Faulty/{kind}")

    async def requests():
        yield request

    argument = requests() if kind.startswith("stream") else request
    if kind.endswith("unary"):
        return [await method(argument)]
    return [response async for response in method(argument)]


@pytest.fixture
def raising(run_server, settings):
    """Run a service whose methods raise `error`, and return the client's status."""

    async def observe(error, kind="unary_unary", request=b"now"):
        async def fault(_context):
            raise error

        async with (
            run_server(settings, services=[faulty_service(fault)]) as addresses,
            open_channel(addresses.grpc) as channel,
        ):
            with pytest.raises(grpc.aio.AioRpcError) as it:
                await call(channel, kind, request)
            return it.value

    return observe


@pytest.mark.parametrize("error", TABLE, ids=lambda error: type(error).__name__)
async def test_each_error_crosses_and_comes_back(raising, error):
    seen = await raising(error)
    assert seen.code() is error.code
    assert seen.details() == str(error)
    back = status_to_error(seen)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


@pytest.mark.parametrize("kind", KINDS)
async def test_each_kind_of_call_is_covered(raising, kind):
    back = status_to_error(await raising(TABLE[0], kind))
    assert isinstance(back, errors.InvalidArgumentError)
    assert back.field == "top_p"


@pytest.mark.parametrize("kind", ["unary_stream", "stream_stream", "written"])
async def test_an_error_after_the_first_message_is_the_status_too(run_server, settings, kind):
    async def fault(_context):
        raise errors.UnavailableError("draining")

    async with (
        run_server(settings, services=[faulty_service(fault)]) as addresses,
        open_channel(addresses.grpc) as channel,
    ):
        stream = channel.stream_stream if kind == "stream_stream" else channel.unary_stream
        argument = b"late" if kind != "stream_stream" else iter([b"late"])
        responses = stream(f"/quire.test.Faulty/{kind}")(argument)
        assert await responses.read() == b"first"
        with pytest.raises(grpc.aio.AioRpcError) as it:
            await responses.read()
        assert it.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_every_error_carries_an_error_info(raising):
    seen = await raising(errors.TooBusyError("full"))
    status = status_pb2.Status.FromString(dict(seen.trailing_metadata())[DETAILS_KEY])
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("RESOURCE_EXHAUSTED", "quire.v1")
    assert dict(info.metadata) == {"retryable": "true"}


async def test_a_full_service_sends_a_retry_delay(raising):
    seen = await raising(errors.TooBusyError("full", retry_after_s=2.5))
    assert dict(seen.trailing_metadata())["grpc-retry-pushback-ms"] == "2500"
    assert status_to_error(seen).retry_after_s == 2.5
    other = await raising(errors.UnavailableError("starting"))
    assert "grpc-retry-pushback-ms" not in dict(other.trailing_metadata())


@pytest.mark.parametrize("kind", KINDS)
async def test_a_bug_is_internal_under_an_id_and_keeps_its_secrets(raising, kind):
    bug = ZeroDivisionError("secret")
    with structlog.testing.capture_logs() as logged:
        seen = await raising(bug, kind)
    assert seen.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(seen)
    error_id = seen.details().split()[2].rstrip(":")
    assert len(error_id) == 16
    assert type(status_to_error(seen)) is errors.QuireError
    (line,) = (line for line in logged if line["log_level"] == "error")
    assert line["error_id"] == error_id
    assert line["exc_info"] is bug


async def test_a_handlers_own_abort_passes(run_server, settings):
    async def fault(context):
        await context.abort(grpc.StatusCode.DATA_LOSS, "gone")

    async with (
        run_server(settings, services=[faulty_service(fault)]) as addresses,
        open_channel(addresses.grpc) as channel,
    ):
        for kind in KINDS:
            with pytest.raises(grpc.aio.AioRpcError) as it:
                await call(channel, kind)
            assert (it.value.code(), it.value.details()) == (grpc.StatusCode.DATA_LOSS, "gone")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancelled_call_is_cancelled_in_the_handler(run_server, settings, kind):
    entered, left = asyncio.Event(), asyncio.Event()

    async def fault(_context):
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            left.set()
            raise

    async with (
        run_server(settings, services=[faulty_service(fault)]) as addresses,
        open_channel(addresses.grpc) as channel,
    ):
        running = asyncio.create_task(call(channel, kind))
        await entered.wait()
        running.cancel()
        async with asyncio.timeout(10):
            await left.wait()


async def test_a_huge_message_in_any_script_still_arrives(raising):
    for letter in ("x", "汉"):
        seen = await raising(errors.InvalidArgumentError("stop", "is " + letter * 100_000))
        assert seen.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert seen.details().startswith("stop is " + letter)
        assert seen.details().endswith("…")


async def test_a_lone_surrogate_in_a_message_still_arrives(raising):
    seen = await raising(errors.NotFoundError("model '\ud800'"))
    assert seen.details() == "model '?'"


async def test_a_message_over_the_limit_is_the_clients_to_shrink_not_to_retry(
    run_server, socket_path, settings
):
    async def fault(_context):
        return b"x" * (2 * 1024 * 1024)

    small = type(settings)(uds=socket_path, max_message_mb=1)
    async with (
        run_server(small, services=[faulty_service(fault)]) as addresses,
        open_channel(addresses.grpc) as channel,
    ):
        for request in (b"x" * (2 * 1024 * 1024), b"small"):
            with pytest.raises(grpc.aio.AioRpcError) as it:
                await call(channel, "unary_unary", request)
            assert it.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert not status_to_error(it.value).retryable


def rpc_error(code, message="m", trailing=()):
    return grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=message
    )


def test_a_foreign_status_without_details_is_understood():
    refused = status_to_error(rpc_error(grpc.StatusCode.INVALID_ARGUMENT))
    assert isinstance(refused, errors.InvalidArgumentError)
    assert str(refused) == "request is refused: m"
    assert type(status_to_error(rpc_error(grpc.StatusCode.NOT_FOUND))) is errors.NotFoundError
    assert type(status_to_error(rpc_error(grpc.StatusCode.UNKNOWN))) is errors.QuireError


def test_details_that_are_not_a_status_are_ignored():
    error = rpc_error(grpc.StatusCode.UNAVAILABLE, trailing=[(DETAILS_KEY, b"\xff\xff")])
    assert isinstance(status_to_error(error), errors.UnavailableError)


def test_the_table_covers_every_error_there_is():
    assert {type(error) for error in TABLE} == {errors.QuireError, *all_subclasses()}
    for error in TABLE:
        assert error_to_status(error)[0] is error.code


def all_subclasses():
    """Errors that have their own status; all others are INTERNAL, like `QuireError`."""
    return {
        kind
        for kind in errors.QuireError.__subclasses__()
        if kind.__module__ == errors.__name__ and "code" in vars(kind)
    }


@pytest.fixture
async def endless_call(tmp_path):
    """A channel to a server that never answers, and a call that has reached it."""
    is_called = asyncio.Event()

    async def never(_request, _context):
        is_called.set()
        await asyncio.Event().wait()

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(never)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("S", {"M": handler})])
    target = f"unix:{tmp_path / 's'}"
    server.add_insecure_port(target)
    await server.start()
    async with grpc.aio.insecure_channel(target) as channel:
        call = channel.unary_unary("/S/M")(b"")
        await asyncio.wait([asyncio.create_task(is_called.wait())])
        yield channel, call
    await server.stop(None)


async def test_a_call_whose_channel_is_closed_is_lost_and_its_task_goes_on(endless_call):
    channel, call = endless_call

    async def wait():
        with calling():
            await call

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    await channel.close(None)
    with pytest.raises(errors.UnavailableError, match="closed during the call"):
        await waiting


async def test_a_task_that_is_cancelled_while_it_calls_is_cancelled(endless_call):
    _, call = endless_call

    async def wait():
        with calling():
            await call

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def count(kind):
    return sum(isinstance(each, kind) for each in gc.get_objects())


class Large:
    """A request that records when it is freed."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("refuses", ["parser", "handler"])
async def test_a_refused_request_is_free_without_a_garbage_collection(
    run_server, settings, kind, refuses
):
    left = weakref.WeakSet()

    def parse(data):
        request = Large()
        left.add(request)
        if data == b"refused":
            raise errors.InvalidArgumentError("request", "has too many bytes")
        return request

    def refuse(request):
        raise errors.InvalidArgumentError("request", f"is {request}")

    async def to_unary(request, _context):
        if kind.startswith("stream"):
            async for each in request:
                refuse(each)
        refuse(request)

    async def to_stream(request, context):
        await to_unary(request, context)
        yield

    behavior = to_unary if kind.endswith("unary") else to_stream
    method = getattr(grpc, f"{kind}_rpc_method_handler")(behavior, request_deserializer=parse)
    generic = grpc.method_handlers_generic_handler("quire.test.Faulty", {kind: method})
    service = Service("quire.test.Faulty", lambda to: to.add_generic_rpc_handlers((generic,)))
    async with (
        run_server(settings, services=[service]) as addresses,
        open_channel(addresses.grpc) as channel,
    ):
        gc.collect()
        num_aborts = count(grpc.aio.AbortError)
        gc.disable()
        try:
            for _ in range(20):
                with pytest.raises(grpc.aio.AioRpcError):
                    await call(channel, kind, b"refused" if refuses == "parser" else b"now")
            # gRPC keeps the requests of the last calls for a while.
            assert len(left) <= 5
            assert count(grpc.aio.AbortError) <= num_aborts + 5
        finally:
            gc.enable()
