"""The routes of /v1/responses."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import cast

import structlog
from aiohttp import ClientConnectionResetError, web

from contract.errors import InvalidArgumentError, QuireError
from contract.outputs import Event, OutputFinished
from router.access.tenancy import with_precedence
from router.http.answers.objects import Json
from router.http.answers.sse import SseResponse
from router.http.answers.streaming import STATUS_WITHIN_S, first_of, rest_of
from router.http.body import BodyReader
from router.http.endpoint import CallId, endpoint, json_response
from router.http.errors import REQUEST_ID_HEADER, error_from_finished
from router.http.openai_responses.body import ResponseBody
from router.http.openai_responses.call import ResponseCall, head_of, prepare, told
from router.http.openai_responses.events import ResponseEvents
from router.request.inference import Inference
from router.request.live import LiveRequest

log = structlog.get_logger()


def responses_routes(inference: Inference, bodies: BodyReader) -> list[web.RouteDef]:
    """Return the routes."""

    async def create_response(request: web.Request, call_id: CallId) -> web.StreamResponse:
        """Answer a conversation, as OpenAI's Responses do; streamed on request."""
        body = await bodies.read(request, ResponseBody, generates=True)
        body.check()
        inference.check_room(body.model)  # before the template is rendered
        call_id.value = f"resp_{uuid.uuid4().hex}"
        model = inference.model.info(body.model).id
        head = head_of(body, call_id.value, time.time(), model, store=False)
        call = await prepare(inference, body, head)
        call = replace(call, request=with_precedence(call.request, request.headers))
        return await _answer(request, inference, call)

    return [web.post("/v1/responses", endpoint(create_response))]


async def _answer(
    http: web.Request, inference: Inference, call: ResponseCall
) -> web.StreamResponse:
    """Answer a call that is not kept: it ends with its client's connection."""
    try:
        async with await inference.generate(call.planned) as live:
            if call.body.stream:
                return await _stream(http, inference, call, live)
            return json_response(await _collected(inference, call, live))
    except InvalidArgumentError as error:
        raise call.named(error) from error


async def _collected(inference: Inference, call: ResponseCall, live: LiveRequest) -> Json:
    events = call.events(inference)
    async for _ in told(_successful(live), events, time.time):
        pass
    return events.response


async def _successful(live: LiveRequest) -> AsyncIterator[Event]:
    async for event in live:
        if isinstance(event, OutputFinished) and (error := error_from_finished(event)):
            raise error
        yield event


async def _stream(
    http: web.Request, inference: Inference, call: ResponseCall, live: LiveRequest
) -> web.StreamResponse:
    sse = SseResponse(http, {REQUEST_ID_HEADER: live.request_id})
    async with first_of(live) as first:
        # A refusal comes soon, and the status can say so.
        await asyncio.wait([first], timeout=STATUS_WITHIN_S)
        if first.done():
            first.result()
        await sse.start()
        await send_events(sse, call.events(inference), rest_of(first, live), time.time)
    return sse.response


async def send_events(
    sse: SseResponse,
    events: ResponseEvents,
    source: AsyncIterator[Event],
    now: Callable[[], float],
    starting_after: int = -1,
) -> None:
    """Send the events behind the one with a number, to the response's end."""
    try:
        with sse.heartbeats():
            async with aclosing(told(source, events, now)) as stream:
                async for new in stream:
                    await _send(sse, new, starting_after)
    except ClientConnectionResetError:
        raise  # the client is gone
    except QuireError as error:
        await _send(sse, events.fail(error), starting_after)
    except Exception:
        log.exception("stream_failed", response_id=events.response["id"])
        await _send(sse, events.fail(QuireError("internal error")), starting_after)
    await sse.end()


async def _send(sse: SseResponse, events: Sequence[Json], starting_after: int) -> None:
    if new := [event for event in events if cast(int, event["sequence_number"]) > starting_after]:
        await sse.send_named(new)
