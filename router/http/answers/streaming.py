"""Streams events: decides when to send the status, and how to send an error."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog
from aiohttp import ClientConnectionResetError, web

from contract.errors import QuireError
from router.http.answers.sse import WAITING, SseResponse
from router.request.cells import Cells
from router.request.inference import Inference

STATUS_WITHIN_S = 5.0
"""How long a stream waits for its first event before it sends status 200. After the status, errors
can only be sent as events."""

log = structlog.get_logger()


async def use_model(
    cells: Cells, model: str, http: web.Request, headers: dict[str, str], *, is_streamed: bool
) -> Inference:
    """Call `Cells.use`; if loading a stream's model takes long, the stream gets heartbeats."""
    if cells.on_demand is None or not is_streamed:
        return await cells.use(model)
    using = asyncio.create_task(cells.use(model))
    try:
        await asyncio.wait((using,), timeout=STATUS_WITHIN_S)
        if not using.done():
            http[WAITING] = sse = SseResponse(http, headers)
            async with sse.before_events():
                await asyncio.wait((using,))
        return await using
    finally:
        using.cancel()


async def stream(
    sse: SseResponse,
    send: Coroutine[Any, Any, None],
    fail: Callable[[QuireError], Awaitable[None]],
    *,
    request_id: str,
    head: Callable[[], bytes] = bytes,
    is_accepted: bool = False,
) -> web.StreamResponse:
    """Send all events and end the response.

    Args:
        sse: The response, not yet started.
        send: Puts all events into `sse`, including the end of the stream.
        fail: Sends an error as an event; called only after the status has been sent.
        request_id: Names the call in the log.
        head: Returns the bytes to send after the headers, before the events of `send`.
        is_accepted: Whether the call can no longer be refused. If so, the status is sent at once.

    Raises:
        QuireError: The call was refused before this function sent anything.
    """
    sending = asyncio.create_task(send)
    try:
        # A refusal comes soon and can still set the status. If a long prompt takes longer, send the
        # headers before its first token, or a proxy may assume that the service hangs. If the
        # headers were sent while the model was loading, continue the heartbeats at once.
        await asyncio.wait(
            (sending, sse.first_event),
            timeout=0 if is_accepted or sse.is_held else STATUS_WITHIN_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if sending.done() and not sse.first_event.done():
            sending.result()
        await sse.start(head())
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
            sending.exception()  # otherwise asyncio logs that the error was never retrieved
    await sse.end()
    return sse.response
