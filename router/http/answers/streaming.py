"""Streams events as they come: when the status is sent, and what an error becomes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import structlog
from aiohttp import ClientConnectionResetError, web

from contract.errors import QuireError
from router.http.answers.sse import SseResponse

STATUS_WITHIN_S = 5.0
"""How long a stream waits for its first event before it sends status 200. After the status, errors
can only be sent as events."""

E = TypeVar("E")

log = structlog.get_logger()


async def stream(
    sse: SseResponse,
    send: Coroutine[Any, Any, None],
    fail: Callable[[QuireError], Awaitable[None]],
    *,
    request_id: str,
) -> web.StreamResponse:
    """Send all events and end the response.

    Args:
        sse: The response, not started.
        send: Puts all events, from the first to what ends the stream, into `sse`.
        fail: Sends an error as an event, once the status is sent.
        request_id: Names the call in the log.

    Raises:
        QuireError: The call was refused; nothing has been sent.
    """
    sending = asyncio.create_task(send)
    try:
        # A refusal comes soon, and the status can say so. A long prompt takes longer: then send the
        # headers, so that no proxy takes the service for hanging.
        await asyncio.wait(
            (sending, sse.first_event),
            timeout=STATUS_WITHIN_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if sending.done() and not sse.first_event.done():
            sending.result()
        await sse.start()
        try:
            with sse.heartbeats():
                await sending
        except QuireError as error:
            await fail(error)
        except ClientConnectionResetError:
            raise  # the client is gone
        except Exception:
            log.exception("stream_failed", request_id=request_id)
            await fail(QuireError("internal error"))
    finally:
        sending.cancel()
        await asyncio.wait([sending])
        if not sending.cancelled():
            sending.exception()  # else asyncio complains that it was never read
    await sse.end()
    return sse.response


@asynccontextmanager
async def first_of(events: AsyncIterator[E]) -> AsyncIterator[asyncio.Future[E]]:
    """Start waiting for the first event; leaving the block ends the wait."""
    first = asyncio.ensure_future(anext(events))
    try:
        yield first
    finally:
        if first.cancel():
            await asyncio.wait([first])
        elif not first.cancelled():
            first.exception()  # else asyncio complains that it was never read


async def rest_of(first: asyncio.Future[E], events: AsyncIterator[E]) -> AsyncIterator[E]:
    """Yield the first event when it is there, and the others."""
    yield await first
    async for event in events:
        yield event
