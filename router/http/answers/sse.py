"""Server-sent events with JSON, and the response that streams them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Final

from aiohttp import ClientConnectionResetError, web

from router.http.strict_json import json_bytes

STARTED: Final = web.RequestKey("started", web.StreamResponse)
"""The key under which an HTTP request keeps its response once the response's head has been sent.

After the head, no other response can be sent.
"""
HEARTBEAT: Final = b":\n\n"
_HEARTBEAT_S = 1.0
_MOST_UNSENT_BYTES = 64 * 1024
"""Limit on buffered bytes; a larger buffer would only hide that the client is slow."""


class SseResponse:
    """A response that streams events; as a `ClientRoom`, it tells whether the client takes more.

    `put` never waits, so a slow client slows only its own request. Callers use `put` only while
    `has_room` is true, so the buffer for a slow client stays small. Events are written to the
    connection's transport directly, because aiohttp's coroutines would take longer than all other
    work for an event. If the client is gone, writes raise ClientConnectionResetError.
    """

    __slots__ = (
        "_drain",
        "_early",
        "_held",
        "_is_chunked",
        "_is_silent",
        "_is_started",
        "_request",
        "_timer",
        "_transport",
        "first_event",
        "heartbeat",
        "response",
    )

    def __init__(
        self, request: web.Request, headers: dict[str, str], heartbeat: bytes = HEARTBEAT
    ) -> None:
        """`heartbeat` is sent while there are no events; by default it is a comment."""
        self._request = request
        self.heartbeat = heartbeat
        self._transport: asyncio.Transport | None = None
        self._held: asyncio.Transport | None = None
        self._is_chunked = False
        self._is_silent = False
        self._timer: asyncio.TimerHandle
        self._is_started = asyncio.Event()
        self.first_event: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """A future that is done once there is an event, even before `start`."""
        self._early = b""
        """The bytes put before `start`: at most one event, and the end of the stream."""
        self.response = web.StreamResponse(
            headers={
                **headers,
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # otherwise nginx buffers events
            }
        )

    @contextlib.contextmanager
    def heartbeats(self) -> Iterator[None]:
        """Send a heartbeat, which clients ignore, after each second without an event.

        A heartbeat shows the client that the router is alive.
        """
        self._send_heartbeat()
        try:
            yield
        finally:
            self._timer.cancel()

    def _send_heartbeat(self) -> None:
        # A timer costs less than a task that sleeps.
        self._timer = asyncio.get_running_loop().call_later(_HEARTBEAT_S, self._send_heartbeat)
        if self._is_silent and self._transport is not None and self.has_room():
            with contextlib.suppress(ClientConnectionResetError):  # the next event will raise it
                self.put(self.heartbeat)
        self._is_silent = True

    async def start(self, head: bytes = b"") -> None:
        """Send status 200, the headers, `head`, and the events that were put before this call.

        After this call, an error can only be sent as an event.
        """
        if self._held is not None:  # the head was sent before
            self._transport, self._held = self._held, None
            self._is_started.set()
            if begun := head + self._early:
                self.put(begun)
            return
        writer = await self.response.prepare(self._request)
        self._request[STARTED] = self.response
        transport = self._request.transport
        if writer is None or transport is None:
            raise ClientConnectionResetError("the client is gone")
        transport.set_write_buffer_limits(high=_MOST_UNSENT_BYTES)
        self._is_chunked = self.response.headers.get("Transfer-Encoding") == "chunked"
        self._transport, self._drain = transport, writer.drain
        self._is_started.set()
        if begun := head + self._early:
            self.put(begun)

    @contextlib.asynccontextmanager
    async def before_events(self) -> AsyncIterator[None]:
        """Send status and headers, then heartbeats until the `async with` block ends.

        After the block, `put` sends nothing and only collects events. The caller's next call of
        `start` sends the collected events, and from then on `put` sends each event at once.
        """
        await self.start()
        with self.heartbeats():
            yield
        self._held, self._transport = self._transport, None
        self._is_started.clear()

    @property
    def is_held(self) -> bool:
        """Whether `before_events` has sent the head, and events wait for `start`."""
        return self._held is not None

    def has_room(self) -> bool:
        if self._transport is None:
            return not self.first_event.done()
        return self._transport.get_write_buffer_size() <= _MOST_UNSENT_BYTES

    async def wait_for_room(self) -> None:
        """Wait until `start` has been called and there is room for an event (`has_room`)."""
        if self._transport is None:
            await self._is_started.wait()
        while not self.has_room():
            # Let the event loop write; only then does it notice a slow client.
            await asyncio.sleep(0)
            await self._drain()

    def put(self, event: bytes) -> None:
        """Send one event: its lines and an empty line."""
        self._is_silent = False
        if (transport := self._transport) is None:
            self._early += event
            if not self.first_event.done():
                self.first_event.set_result(None)
            return
        if transport.is_closing():
            raise ClientConnectionResetError("the client is gone")
        transport.write(b"%x\r\n%b\r\n" % (len(event), event) if self._is_chunked else event)

    def put_between(self, frame: tuple[bytes, bytes], text: bytes) -> None:
        """Send one event: `text` between the two parts of `frame`."""
        before, behind = frame
        transport = self._transport
        if transport is None or not self._is_chunked or transport.is_closing():
            self.put(before + text + behind)
            return
        self._is_silent = False
        num_bytes = len(before) + len(text) + len(behind)
        transport.write(b"%x\r\n%b%b%b\r\n" % (num_bytes, before, text, behind))

    async def send(self, value: object) -> None:
        """Send a value as one event."""
        self.put(sse_event(value))
        await self.wait_for_room()

    async def send_named(self, events: Sequence[Mapping[str, object]]) -> None:
        """Send several events in one write; the name of each event is its `type`."""
        if events:  # an empty chunk would end the body
            self.put(named_events(events))
            await self.wait_for_room()

    async def send_done(self) -> None:
        """Send the event that ends OpenAI's streams."""
        self.put(b"data: [DONE]\n\n")

    async def end(self) -> None:
        await self.response.write_eof()


WAITING: Final = web.RequestKey("waiting", SseResponse)
"""The key under which an HTTP request keeps a response whose head was sent before the model was
loaded."""


def sse_of(
    request: web.Request, headers: dict[str, str], heartbeat: bytes = HEARTBEAT
) -> SseResponse:
    """Return the response for a call's events.

    A call that had to wait until its model was loaded has a response already (`WAITING`). This
    response is then returned.
    """
    waiting: SseResponse | None = request.get(WAITING)
    if waiting is None:
        return SseResponse(request, headers, heartbeat)
    waiting.heartbeat = heartbeat
    return waiting


def sse_event(value: object) -> bytes:
    """Return an event without a name, whose data is a value as JSON."""
    return b"data: %b\n\n" % json_bytes(value)


def named_events(events: Sequence[Mapping[str, object]]) -> bytes:
    """Return the bytes of several events; the name of each event is its `type`."""
    return b"".join(
        b"event: %b\n%b" % (str(event["type"]).encode(), sse_event(event)) for event in events
    )
