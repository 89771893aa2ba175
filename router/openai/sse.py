"""Server-sent events: one JSON object per event, one write per event."""

from aiohttp import web

from router.openai.json_text import json_bytes


class SseResponse:
    """A response that carries events.

    Writes wait while the client's socket is full, so a client that reads slowly slows its own
    request and nothing else; a client that is gone makes them raise ClientConnectionResetError.
    """

    def __init__(self, request: web.Request, headers: dict[str, str]) -> None:
        self._request = request
        self.response = web.StreamResponse(
            headers={
                **headers,
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # or nginx gathers the events into pages
            }
        )

    async def start(self) -> None:
        """Send status 200 and the headers; from here on an error can only be an event."""
        await self.response.prepare(self._request)

    async def send(self, value: object, event_id: str = "") -> None:
        """Send one event; with an id, which is ASCII, if there is one."""
        head = b"id: %b\n" % event_id.encode() if event_id else b""
        await self.response.write(b"%bdata: %b\n\n" % (head, json_bytes(value)))

    async def send_done(self) -> None:
        """Send what OpenAI's streams end with."""
        await self.response.write(b"data: [DONE]\n\n")

    async def end(self) -> None:
        """End the response."""
        await self.response.write_eof()
