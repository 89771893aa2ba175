"""Server-sent events: one JSON object per event, one write per event."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence

from aiohttp import ClientConnectionResetError, web

from router.http.strict_json import json_bytes

_HEARTBEAT_S = 1.0


class SseResponse:
    """A response that carries events.

    Writes wait while the client's socket is full: a slow client slows only its own request. If the
    client is gone, they raise ClientConnectionResetError.
    """

    def __init__(self, request: web.Request, headers: dict[str, str]) -> None:
        self._request = request
        self._is_silent = True
        self.response = web.StreamResponse(
            headers={
                **headers,
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # else nginx buffers events
            }
        )

    @contextlib.contextmanager
    def heartbeats(self) -> Iterator[None]:
        """Send a comment, which readers skip, after each second without an event.

        So a client can tell a router that hangs from one that has no event yet.
        """
        heartbeats = asyncio.create_task(self._send_heartbeats(), name="heartbeats of a stream")
        try:
            yield
        finally:
            heartbeats.cancel()

    async def _send_heartbeats(self) -> None:
        with contextlib.suppress(ClientConnectionResetError):  # the next event raises it
            while True:
                self._is_silent = True
                await asyncio.sleep(_HEARTBEAT_S)
                if self._is_silent:
                    await self.response.write(b":\n\n")

    async def start(self) -> None:
        """Send status 200 and the headers; from here on an error can only be an event."""
        await self.response.prepare(self._request)

    async def send(self, value: object, event_id: str = "") -> None:
        """Send one event, with an ASCII id unless that is empty."""
        self._is_silent = False
        head = b"id: %b\n" % event_id.encode() if event_id else b""
        await self.response.write(b"%bdata: %b\n\n" % (head, json_bytes(value)))

    async def send_named(self, events: Sequence[Mapping[str, object]]) -> None:
        """Send events that have their `type` as a name, too, in one write."""
        self._is_silent = False
        await self.response.write(
            b"".join(
                b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), json_bytes(event))
                for event in events
            )
        )

    async def send_done(self) -> None:
        """Send the end of OpenAI's streams."""
        await self.response.write(b"data: [DONE]\n\n")

    async def end(self) -> None:
        await self.response.write_eof()
