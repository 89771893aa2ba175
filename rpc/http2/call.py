"""One gRPC call. It runs the handler and is the handler's servicer context."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, NoReturn, Protocol, TypeAlias

import grpc
import grpc.aio
import structlog

from rpc.http2.headers import (
    Headers,
    Metadata,
    RequestHeaders,
    encode_metadata,
    encode_status,
    first_headers,
)
from rpc.http2.inbox import Inbox, RefusedMessageError
from rpc.http2.limits import ConnectionLimits
from rpc.http2.outbox import Outbox, OutStream

_EOF: Final[Any] = grpc.aio.EOF  # type: ignore[attr-defined] # the stubs lack it
_LONGEST_TIMER_S: Final = 1e6
"""Longest timeout that gets a timer; gRPC allows timeouts that an event loop cannot schedule."""

FindHandler: TypeAlias = Callable[[str, Metadata], Awaitable["grpc.RpcMethodHandler[Any, Any]"]]

log = structlog.get_logger()


class Wire(Protocol):
    """The part of a connection that its calls use."""

    limits: ConnectionLimits
    outbox: Outbox
    peer: str
    """The client's address, as gRPC writes it."""

    @property
    def auth_context(self) -> Mapping[str, list[bytes]]:
        """The names in the client's certificate, as in `grpc.aio.ServicerContext`."""

    def send_headers(self, stream: OutStream, headers: Headers, *, end: bool = False) -> None:
        """Send headers; if `end` is true, the stream ends with them."""


class Call:
    """A call, from its request headers to the end of its handler."""

    def __init__(
        self, wire: Wire, stream: OutStream, inbox: Inbox, request: RequestHeaders
    ) -> None:
        self.inbox = inbox
        self.stream = stream
        self._wire = wire
        self._outbox = wire.outbox
        self._max_sent_bytes = wire.limits.max_sent_bytes
        self._method = request.method
        self._metadata = request.metadata
        self._loop = asyncio.get_running_loop()
        self._deserialize: Callable[[bytes], Any] | None = None
        self._serialize: Callable[[Any], bytes] | None = None
        self._task: asyncio.Task[None] | None = None
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        if (timeout_s := request.timeout_s) is not None:
            self._deadline = self._loop.time() + timeout_s
            if timeout_s < _LONGEST_TIMER_S:
                self._timer = self._loop.call_later(timeout_s, self._expire)
        self._code = grpc.StatusCode.OK
        self._details = ""
        self._trailing: Metadata = ()
        self._trailers: Headers = []
        self._has_read = False
        self._has_begun = False
        """Whether the response's first headers have been sent."""
        self._is_over = False
        """Whether the status was sent, or the client has cancelled the call or disconnected."""
        self._callbacks: list[Callable[[Any], None]] = []

    # --- for the connection ---------------------------------------------------------------------

    def start(self, find_handler: FindHandler) -> asyncio.Task[None]:
        """Start a task that runs the handler."""
        self._task = self._loop.create_task(self._run(find_handler))
        self._task.add_done_callback(self._on_done)
        return self._task

    def leave(self) -> None:
        """Cancel the handler, because the client has cancelled the call or disconnected."""
        if not self._is_over:
            self._is_over = True
            self._code = grpc.StatusCode.CANCELLED
            self._outbox.end(self.stream)
            self._cancel()

    def cut(self, code: grpc.StatusCode, details: str) -> None:
        """End the call with a status, and cancel its handler."""
        if not self._is_over:
            self._end(code, details)
            self._cancel()

    def _expire(self) -> None:
        self.cut(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _on_done(self, _: asyncio.Task[None]) -> None:
        self._task = None
        self.cut(grpc.StatusCode.CANCELLED, "the handler was cancelled")
        if self._timer is not None:
            self._timer.cancel()
        for callback in self._callbacks:
            try:
                callback(self)
            except Exception:
                log.exception("a callback of a call failed", method=self._method)
        self._callbacks.clear()

    # --- the handler's run ----------------------------------------------------------------------

    async def _run(self, find_handler: FindHandler) -> None:
        try:
            await self._serve(await find_handler(self._method, self._metadata))
        except grpc.aio.AbortError:
            pass  # `abort` has sent the status
        except Exception as error:
            log.exception("unexpected error", method=self._method)
            self.cut(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")

    async def _serve(self, handler: Any) -> None:
        if handler is None:
            self._end(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            return
        self._deserialize = handler.request_deserializer
        self._serialize = handler.response_serializer
        if handler.request_streaming:
            request: Any = self._requests()
        elif (request := await self.read()) is _EOF:
            self._end(grpc.StatusCode.UNIMPLEMENTED, "the call has no request message")
            return
        behavior = _behavior(handler)
        result = behavior(request, self)
        del request  # it may be large
        if not handler.response_streaming:
            response = await result
            if self._code is grpc.StatusCode.OK:
                await self.write(response)
        elif hasattr(result, "__aiter__"):
            async with contextlib.aclosing(result) as responses:
                async for response in responses:
                    await self.write(response)
        else:
            await result
        if not self._is_over:
            await self.wait_for_room()
            self._end(self._code, self._details)

    async def _requests(self) -> AsyncIterator[Any]:
        while (request := await self.read()) is not _EOF:
            yield request

    def _end(self, code: grpc.StatusCode, details: str) -> None:
        self._is_over = True
        self._code, self._details = code, details
        self._outbox.end(self.stream)
        headers = encode_status(code, details) + self._trailers
        if not self._has_begun:
            headers = self._first_headers + headers
        self._wire.send_headers(self.stream, headers, end=True)

    @property
    def _first_headers(self) -> Headers:
        return first_headers(accepts_compressed=self._wire.limits.accepts_compressed)

    def _check_live(self) -> None:
        if self._is_over:
            raise asyncio.CancelledError(f"the call of {self._method} is over")

    # --- for handlers: writing from another task -------------------------------------------------

    def has_room(self) -> bool:
        """Whether all responses that were given to `put` or `write` have been sent."""
        return self.stream.unsent is None

    async def wait_for_room(self) -> None:
        """Wait until all responses have been sent; raises CancelledError if the call is over."""
        await self.stream.wait()
        self._check_live()

    def put(self, message: Any) -> None:
        """Send as much of a response as the client and the transport have room for.

        The rest waits in memory until there is room, and is sent before the call's status. To limit
        how much waits, a caller with many responses asks `has_room` before each response. If the
        call is over, nothing is sent. A response that is too large ends the call.
        """
        if self._is_over:
            return
        if not self._has_begun:
            self._has_begun = True
            self._wire.send_headers(self.stream, self._first_headers)
        data = message if self._serialize is None else self._serialize(message)
        if len(data) > self._max_sent_bytes:
            self.cut(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"Sent message larger than max ({len(data)} vs. {self._max_sent_bytes})",
            )
            return
        self._outbox.put(self.stream, data)

    # --- for handlers: the methods of grpc.aio.ServicerContext that our servicers use ------------

    async def read(self) -> Any:
        """Return the next request; after the last request, return `grpc.aio.EOF`."""
        if self._has_read:
            await asyncio.sleep(0)  # otherwise thousands of small messages would hold the loop
        self._has_read = True
        self._check_live()
        try:
            data = await self.inbox.read()
        except RefusedMessageError as error:
            self.cut(error.code, error.details)
            raise asyncio.CancelledError from None
        if data is None:
            return _EOF
        return data if self._deserialize is None else self._deserialize(data)

    async def write(self, message: Any) -> None:
        """Send a response; wait until the whole response has been sent."""
        if self.stream.unsent is not None:
            await self.wait_for_room()
        self.put(message)
        self._check_live()
        if self.stream.unsent is not None:
            await self.wait_for_room()
        elif self._outbox.is_full:
            self._outbox.flush()
            await asyncio.sleep(0)  # lets other tasks run if the handler never waits

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Iterable[Any] = ()
    ) -> NoReturn:
        """End the call with an error, and raise AbortError."""
        self._check_live()
        if code is grpc.StatusCode.OK:
            raise ValueError("abort needs an error code, not OK")
        if trailing := tuple(trailing_metadata):
            self.set_trailing_metadata(trailing)
        await self.wait_for_room()
        self._end(code, details or self._details)
        raise grpc.aio.AbortError("Locally aborted.")

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def set_trailing_metadata(self, trailing_metadata: Iterable[Any]) -> None:
        """Replace the metadata that is sent with the status; raises ValueError if it is invalid."""
        trailing = tuple(trailing_metadata)
        self._trailers = encode_metadata(trailing)
        self._trailing = trailing

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Metadata:
        return self._trailing

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def peer(self) -> str:
        return self._wire.peer

    def auth_context(self) -> Mapping[str, list[bytes]]:
        return self._wire.auth_context

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline; None: no deadline."""
        return None if self._deadline is None else max(self._deadline - self._loop.time(), 0.0)

    def cancelled(self) -> bool:
        return self._is_over and self._code is grpc.StatusCode.CANCELLED

    def done(self) -> bool:
        return self._is_over

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback` with this object when the handler has ended."""
        self._callbacks.append(callback)


def _behavior(handler: Any) -> Callable[[Any, Any], Any]:
    kinds = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    index = 2 * handler.request_streaming + handler.response_streaming
    behavior: Callable[[Any, Any], Any] = kinds[index]
    return behavior
