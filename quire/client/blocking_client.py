"""The blocking client: runs the coroutines of `AsyncClient` without an event loop.

A coroutine suspends only where it awaits an unfinished operation. On a blocking channel, each
operation has finished when its call returns, so one `send` runs a coroutine of `AsyncClient` from
start to end. No thread and no queue is between the caller and gRPC. So an event costs a third less
CPU than with an event loop in another thread. Also, a program that uses the client can fork, use
threads and exit as safely as a program that uses only gRPC.
"""

import functools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar

import grpc

from quire.client.async_client import AsyncClient, Transport
from quire.client.attempts import Metadata
from quire.client.closes import Closes
from quire.client.retry import Retry
from quire.client.routers import Targets
from quire.client.types import Event
from rpc.observe import telemetry
from rpc.peers.channel import open_blocking_channel
from rpc.security.tls import ClientTls
from rpc.transport import DEFAULT_MAX_MESSAGE_MB

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["Client", P], T]:
    """Make a method of `Client` from a coroutine method of `AsyncClient`."""

    @functools.wraps(method)
    def call(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return _run(method(self._client, *args, **kwargs))

    return call


def _blocking_generator(
    method: Callable[Concatenate[AsyncClient, P], AsyncGenerator[Event]],
) -> Callable[Concatenate["Client", P], Generator[Event]]:
    """Like `_blocking`, for a generator. Closing `Client`'s generator closes `AsyncClient`'s."""

    @functools.wraps(method)
    def generate(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> Generator[Event]:
        events = method(self._client, *args, **kwargs)
        try:
            while True:
                try:
                    event = _run(anext(events))
                except StopAsyncIteration:
                    return
                yield event
        finally:
            _run(events.aclose())

    return generate


class Client(Closes):
    """The blocking client. Threads may share a client."""

    def __init__(
        self,
        target: Targets,
        max_message_mb: int = DEFAULT_MAX_MESSAGE_MB,
        *,
        retry: Retry | None = None,
        api_key: str = "",
        tls: ClientTls | None = None,
    ) -> None:
        """Connect to `target` (see `Targets`) at the first call.

        `api_key` is for services that require a key. If `tls` is None, calls and the key are not
        encrypted; a Unix socket needs no encryption.
        """
        self._client = AsyncClient(
            target, max_message_mb, retry=retry, api_key=api_key, tls=tls, transport=_BLOCKING
        )

    def close(self) -> None:
        """Close the connections; calls that are still running end."""
        _run(self._client.close())

    generate = _blocking_generator(AsyncClient.generate)
    generate_once = _blocking(AsyncClient.generate_once)
    embed = _blocking(AsyncClient.embed)
    tokenize = _blocking(AsyncClient.tokenize)
    detokenize = _blocking(AsyncClient.detokenize)
    models = _blocking(AsyncClient.models)
    load = _blocking(AsyncClient.load)
    describe_kv = _blocking(AsyncClient.describe_kv)
    describe_activity = _blocking(AsyncClient.describe_activity)


def _run(work: Awaitable[T]) -> T:
    """Run an awaitable that never suspends."""
    steps = work.__await__()
    try:
        steps.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("a coroutine of the blocking client has suspended")


class _BlockingChannel:
    """A `grpc.Channel` with the methods of `grpc.aio.Channel` that the client uses."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def unary_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Awaitable[Any]]:
        method = self._channel.unary_unary(*args, **kwargs)

        async def call(request: Any, *, timeout: float | None, metadata: Metadata) -> Any:  # noqa: ASYNC109
            return method(request, timeout=timeout, metadata=_traced(metadata))

        return call

    def unary_stream(self, *args: Any, **kwargs: Any) -> Callable[..., "_Responses"]:
        method = self._channel.unary_stream(*args, **kwargs)

        def call(request: Any, *, timeout: float | None, metadata: Metadata) -> _Responses:
            return _Responses(method(request, timeout=timeout, metadata=_traced(metadata)))

        return call

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """Return gRPC's method unchanged; the stub needs it, but the client does not call it."""
        return self._channel.stream_stream(*args, **kwargs)

    async def close(self, grace: float | None) -> None:  # noqa: ARG002 - as grpc.aio has it
        self._channel.close()


class _Responses:
    """A blocking stream of responses, to be read with `async for`."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.cancel = call.cancel

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            return next(self._call)
        except StopIteration:
            raise StopAsyncIteration from None


def _open_channel(*args: Any, **kwargs: Any) -> _BlockingChannel:
    return _BlockingChannel(open_blocking_channel(*args, **kwargs))


async def _sleep(delay_s: float) -> None:
    time.sleep(delay_s)  # noqa: ASYNC251 - there is no event loop


def _traced(metadata: Metadata) -> tuple[tuple[str, str], ...]:
    """Add the current trace context to `metadata`, as `open_channel` does for asyncio."""
    return (*telemetry.inject_metadata(), *metadata)


_BLOCKING: Final = Transport(_open_channel, _sleep)
