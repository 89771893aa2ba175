"""The routes of /v1/responses."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import MappingProxyType
from typing import Final, cast

import structlog
from aiohttp import web

from contract.errors import InvalidArgumentError, QuireError, UnimplementedError
from contract.outputs import Event, OutputFinished
from router.access.tenancy import TENANT_KEY, with_precedence
from router.http.answers.objects import Json
from router.http.answers.sse import SseResponse, named_events, sse_of
from router.http.answers.streaming import stream, use_model
from router.http.body import BodyReader, check_kind
from router.http.endpoint import CallId, check_not_resumable, endpoint, json_response
from router.http.errors import REQUEST_ID_HEADER, error_from_finished
from router.http.listing import integer, page
from router.http.openai_responses.body import ResponseBody
from router.http.openai_responses.call import ResponseCall, head_of, prepare, restored
from router.http.openai_responses.events import ResponseEvents
from router.http.openai_responses.items import Item
from router.http.openai_responses.kept import KIND, MAX_LISTED, KeptResponses, input_of
from router.http.strict_json import excerpt
from router.live.live_request import LiveRequest
from router.request.cells import Cells
from router.request.inference import Inference
from router.stored_turns.running import Seen
from router.stored_turns.turn import Turn
from router.stored_turns.turns import Turns

_MAX_BODIES = 16
"""Limit on the size of the conversation that a new response continues, as a multiple of the limit
on a body. A conversation may be much larger than a body, because each of its turns stores the
instructions and tools again."""

LEFT_OUT_HEADER: Final = "X-Quire-Tools-Left-Out"
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})

log = structlog.get_logger()


def responses_routes(cells: Cells, bodies: BodyReader, turns: Turns | None) -> list[web.RouteDef]:
    """Return the routes; if `turns` is None, responses are not stored."""
    kept = None if turns is None else KeptResponses(cells, turns, _MAX_BODIES * bodies.max_bytes)
    if turns is not None and kept is not None:
        turns.serve(KIND, kept)

    async def create_response(request: web.Request, call_id: CallId) -> web.StreamResponse:
        """Answer a conversation in one piece, as a stream, or in the background (Responses API)."""
        body = await bodies.read(request, ResponseBody, generates=True)
        body.check()
        response_id = f"resp_{uuid.uuid4().hex}"
        _name(call_id, request, response_id)
        told = _told(body)
        headers = {REQUEST_ID_HEADER: call_id.value, **told}
        inference = await use_model(
            cells, body.model, request, headers, is_streamed=bool(body.stream)
        )
        inference.check_room(body.model)  # before the template is rendered
        if kept is None:
            _check_without_store(body)
        elif body.store is not False:
            return await _answer_kept(request, kept, body, response_id, call_id, told)
        check_not_resumable(request)
        model = inference.model.info(body.model).id
        head = head_of(body, response_id, time.time(), model, store=False)
        earlier: Sequence[Item] = ()
        if kept is not None:
            earlier = await kept.earlier(tenant_of(request), body.previous_response_id)
        call = await prepare(inference, body, head, earlier)
        call = replace(call, request=with_precedence(call.request, request.headers))
        return await _answer(request, inference, call, headers)

    async def get_response(request: web.Request, call_id: CallId) -> web.StreamResponse:
        """Return a stored response, or stream its events after a given one."""
        found = await find(request)
        _name(call_id, request, found.id)
        query = request.query
        if query.get("stream", "false").lower() != "true":
            return _json(await kept_here().shown(found))
        after = integer(query, "starting_after", -1, least=-1, most=10**9)
        return await _follow(request, kept_here(), found, call_id, starting_after=after)

    async def cancel_response(request: web.Request, _: CallId) -> web.StreamResponse:
        """Cancel a response; a response that has ended does not change."""
        check_kind(request)
        cancelled = await kept_here().turns.cancel(await find(request))
        return _json(await kept_here().shown(cancelled))

    async def delete_response(request: web.Request, _: CallId) -> web.StreamResponse:
        """Cancel and delete a response."""
        found = await find(request)
        await kept_here().turns.delete(found)
        return json_response({"id": found.id, "object": "response", "deleted": True})

    async def list_input_items(request: web.Request, _: CallId) -> web.StreamResponse:
        """List the input items of a response, without the items of earlier responses."""
        found = await find(request)
        items = (await asyncio.to_thread(input_of, found))[::-1]
        return json_response(page(items, request.query, most=MAX_LISTED))

    def tenant_of(request: web.Request) -> str:
        return cells.shared.tenant_of(request.headers.get(TENANT_KEY, ""))

    def kept_here() -> KeptResponses:
        if kept is None:
            raise UnimplementedError("this service stores no responses (--turn-store)")
        return kept

    async def find(request: web.Request) -> Turn:
        return await kept_here().find(tenant_of(request), request.match_info["id"])

    return [
        web.post("/v1/responses", endpoint(create_response)),
        # A stream cannot answer HEAD.
        web.get("/v1/responses/{id}", endpoint(get_response), allow_head=False),
        web.delete("/v1/responses/{id}", endpoint(delete_response)),
        web.post("/v1/responses/{id}/cancel", endpoint(cancel_response)),
        web.get("/v1/responses/{id}/input_items", endpoint(list_input_items)),
    ]


def _name(call_id: CallId, http: web.Request, response_id: str) -> None:
    """Use the response's id as the call's id, unless the client has set the call's id."""
    if REQUEST_ID_HEADER not in http.headers:
        call_id.value = response_id
    else:
        log.info("response of a call", response=response_id, request_id=call_id.value)


def _check_without_store(body: ResponseBody) -> None:
    for name, value in (
        ("store", body.store or None),
        ("background", body.background or None),
        ("previous_response_id", body.previous_response_id),
    ):
        if value is not None:
            raise UnimplementedError(
                f"{name} is {excerpt(value)}; this service stores no responses (--turn-store)"
            )


async def _answer_kept(
    http: web.Request,
    kept: KeptResponses,
    body: ResponseBody,
    response_id: str,
    call_id: CallId,
    headers: Mapping[str, str],
) -> web.StreamResponse:
    """Answer a call whose response is stored.

    The response continues even if the client disconnects.
    """
    turn, call = await kept.accept(
        body,
        response_id,
        kept.cells.shared.tenant_of(http.headers.get(TENANT_KEY, "")),
        http.headers,
    )
    if turn.id != response_id:  # an older response has this idempotency key
        _name(call_id, http, turn.id)
    if body.stream:
        return await _follow(http, kept, turn, call_id, call, headers)
    shown = await (kept.shown(turn) if body.background else kept.whole(turn, call))
    return _json(shown, headers)


def _told(body: ResponseBody) -> Mapping[str, str]:
    """Return the header that names the left-out tools, if there are any."""
    return {LEFT_OUT_HEADER: ", ".join(body.left_out)} if body.left_out else {}


def _json(body: bytes, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=body, content_type="application/json", headers=headers)


async def _follow(
    http: web.Request,
    kept: KeptResponses,
    turn: Turn,
    call_id: CallId,
    call: ResponseCall | None = None,
    headers: Mapping[str, str] = _NO_HEADERS,
    *,
    starting_after: int = -1,
) -> web.StreamResponse:
    inference = await kept.cells.known(turn.model)
    call = call or await restored(inference, turn)
    # An error at this point can still set the HTTP status
    made, seen = call.events(inference), Seen()
    async with aclosing(kept.read(turn, seen)) as events:
        return await _stream(
            sse_of(http, {REQUEST_ID_HEADER: call_id.value, **headers}),
            made,
            events,
            now=seen.end,
            starting_after=starting_after,
            is_accepted=True,
        )


async def _answer(
    http: web.Request, inference: Inference, call: ResponseCall, headers: dict[str, str]
) -> web.StreamResponse:
    """Answer a call whose response is not stored; a disconnect cancels its request."""
    try:
        async with await inference.generate(call.planned) as live:
            if call.body.stream:
                sse = sse_of(http, headers)
                return await _stream(sse, call.events(inference), live)
            return json_response(await _collected(inference, call, live), headers)
    except InvalidArgumentError as error:
        raise call.named(error) from error


async def _collected(inference: Inference, call: ResponseCall, live: LiveRequest) -> Json:
    events = call.events(inference)
    async for event in _successful(live):
        events.take(event, time.time)
    return events.response


async def _successful(live: LiveRequest) -> AsyncIterator[Event]:
    async for event in live:
        if isinstance(event, OutputFinished) and (error := error_from_finished(event)):
            raise error
        yield event


async def _stream(
    sse: SseResponse,
    made: ResponseEvents,
    source: AsyncIterator[Event],
    *,
    now: Callable[[], float] = time.time,
    starting_after: int = -1,
    is_accepted: bool = False,
) -> web.StreamResponse:
    """Stream a response's events after event number `starting_after`."""

    def wanted(events: Sequence[Json]) -> list[Json]:
        return [each for each in events if cast(int, each["sequence_number"]) > starting_after]

    begun = named_events(wanted(made.begin()))

    async def send() -> None:
        async for event in source:
            await sse.send_named(wanted(made.take(event, now)))

    async def fail(error: QuireError) -> None:
        await sse.send_named(wanted(made.fail(error)))

    return await stream(
        sse,
        send(),
        fail,
        request_id=str(made.response["id"]),
        head=lambda: begun,
        is_accepted=is_accepted,
    )
