"""Server-sent events: one JSON object per event, one write per event."""

import asyncio
import contextlib
from collections.abc import Iterator

from aiohttp import ClientConnectionResetError, web

from router.http.json_text import json_bytes

_BEAT_S = 1.0


class SseResponse:
    """A response that carries events.

    Writes wait while the client's socket is full, so a client that reads slowly slows its own
    request and nothing else; a client that is gone makes them raise ClientConnectionResetError.
    """

    def __init__(self, request: web.Request, headers: dict[str, str]) -> None:
        self._request = request
        self._is_silent = True
        self.response = web.StreamResponse(
            headers={
                **headers,
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # or nginx gathers the events into pages
            }
        )

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Send a comment in each second without an event, which readers of events skip.

        So a client can tell a router that hangs from one that has nothing to say yet.
        """
        beats = asyncio.create_task(self._beat(), name="beats of a stream")
        try:
            yield
        finally:
            beats.cancel()

    async def _beat(self) -> None:
        with contextlib.suppress(ClientConnectionResetError):  # whoever sends an event learns of it
            while True:
                self._is_silent = True
                await asyncio.sleep(_BEAT_S)
                if self._is_silent:
                    await self.response.write(b":\n\n")

    async def start(self) -> None:
        """Send status 200 and the headers; from here on an error can only be an event."""
        await self.response.prepare(self._request)

    async def send(self, value: object, event_id: str = "") -> None:
        """Send one event; with an id, which is ASCII, if there is one."""
        self._is_silent = False
        head = b"id: %b\n" % event_id.encode() if event_id else b""
        await self.response.write(b"%bdata: %b\n\n" % (head, json_bytes(value)))

    async def send_done(self) -> None:
        """Send what OpenAI's streams end with."""
        await self.response.write(b"data: [DONE]\n\n")

    async def end(self) -> None:
        """End the response."""
        await self.response.write_eof()
