"""Answers one call: starts its requests, and streams or collects their events."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeVar

import structlog
from aiohttp import ClientConnectionResetError, web

from contract.errors import FailedPreconditionError, InvalidArgumentError, QuireError
from contract.outputs import Event, OutputDelta, OutputFinished, PromptScores, Usage
from contract.request import GenerateRequest, OutputReceived, ResumeRequest
from router.http.answers.event_ids import StreamPosition
from router.http.answers.merge import merge
from router.http.answers.objects import CollectedOutput, Json, Shape, usage_json
from router.http.answers.sse import SseResponse
from router.http.errors import (
    REQUEST_ID_HEADER,
    error_from_finished,
    error_json,
    error_with_json_names,
)
from router.http.strict_json import json_bytes
from router.request.inference import Inference
from router.request.live import LiveRequest

log = structlog.get_logger()

E = TypeVar("E")

STATUS_WITHIN_S = 5.0
"""How long a stream waits for its first event before it sends status 200. After the status, errors
can only be sent as events."""


class UsageInStream(Enum):
    """Where a stream reports the usage."""

    NEVER = "never"
    AT_END = "at_end"
    ALWAYS = "always"
    """In every event: the usage so far."""


@dataclass(frozen=True, slots=True)
class Call:
    """One client call: one request per prompt, `n` outputs of each.

    Output j of request i is choice `i * n + j`.
    """

    request_id: str
    requests: Sequence[GenerateRequest]
    n: int
    shape: Shape
    stream: bool
    usage_in_stream: UsageInStream
    received: Mapping[int, OutputReceived] | None = None
    """What the client has of each output, if it resumes a stream; else None."""
    prompts: list[Sequence[int]] = field(default_factory=list)
    """The token ids of each request's prompt, once known."""
    field_to_json: Mapping[str, str] = field(default_factory=dict)
    """The JSON names of request fields that differ from `GenerateRequest`'s."""

    hides_outputs: bool = False
    """Whether only prompts are shown; then the usage counts no output."""

    def shown(self, usages: Sequence[Usage]) -> Sequence[Usage]:
        """Return the usages as the client is told."""
        if not self.hides_outputs:
            return usages
        return [replace(usage, completion_tokens=0) for usage in usages]

    @property
    def is_resumable(self) -> bool:
        """Whether its stream can be resumed from an event's id.

        An id covers one request, and prompt log-probabilities are not sent again.
        """
        return (
            self.stream
            and len(self.requests) == 1
            and self.requests[0].resumable
            and self.requests[0].sampling.prompt_logprobs is None
        )


async def answer(http: web.Request, inference: Inference, call: Call) -> web.StreamResponse:
    """Answer the call. When this returns, raises or is cancelled, its requests have ended."""
    try:
        if len(call.requests) > 1:
            await inference.check_capacity(len(call.requests), call.n)
        async with AsyncExitStack() as stack:
            lives: list[LiveRequest] = []
            for request in call.requests:
                live = await stack.enter_async_context(await _open(inference, call, request))
                lives.append(live)
                call.prompts.append(live.prompt_token_ids)
                if call.received is not None:
                    _catch_up(call, request, live)
            events = await stack.enter_async_context(aclosing(merge(lives)))
            if call.stream:
                return await _stream(http, call, lives[0], events)
            return await _collect(call, lives[0], events)
    except InvalidArgumentError as error:
        raise error_with_json_names(call.field_to_json, error) from error


async def _open(inference: Inference, call: Call, request: GenerateRequest) -> LiveRequest:
    """Start a request, or resume it where its client is."""
    if call.received is None:
        return await inference.generate(request)
    return await inference.resume(
        ResumeRequest(
            request.request_id,
            request.tenant,
            call.received,
            has_prompt_scores=False,
            deadline=request.deadline,
        )
    )


def _catch_up(call: Call, request: GenerateRequest, live: LiveRequest) -> None:
    """Replay to the shape what the client has, so that it knows what it held back of a tool call.

    Raises `FailedPreconditionError` if parts of that were lost.
    """
    for output in live.outputs:
        if (skipped := output.skipped) is None:
            continue
        if request.sampling.logprobs is not None and len(skipped.logprobs) < len(skipped.token_ids):
            raise FailedPreconditionError("log-probabilities of this stream were lost")
        call.shape.delta(output.index, skipped)


async def _collect(
    call: Call, live: LiveRequest, events: AsyncIterator[tuple[int, Event]]
) -> web.Response:
    outputs = [CollectedOutput() for _ in range(call.n * len(call.requests))]
    usages: list[Usage] = []
    async for i, event in events:
        match event:
            case OutputDelta():
                outputs[i * call.n + event.output_index].add(event)
            case OutputFinished():
                if error := error_from_finished(event):
                    raise error
                outputs[i * call.n + event.output_index].finished = event
            case PromptScores():
                for index in range(i * call.n, (i + 1) * call.n):
                    call.shape.score(index, event)
            case Usage():
                usages.append(event)
    choices = []
    for index, output in enumerate(outputs):
        assert output.finished is not None, "a request ended without finishing each output"
        choices.append(call.shape.whole(index, output, output.finished))
    body = _head(call, live, call.shape.object_name)
    body |= {"choices": choices, **call.shape.once(), "usage": usage_json(call.shown(usages))}
    return web.Response(
        body=json_bytes(body),
        content_type="application/json",
        headers={REQUEST_ID_HEADER: call.request_id},
    )


async def _stream(
    http: web.Request, call: Call, live: LiveRequest, events: AsyncIterator[tuple[int, Event]]
) -> web.StreamResponse:
    sse = SseResponse(http, {REQUEST_ID_HEADER: call.request_id})
    async with first_of(events) as first:
        # A refusal comes soon, and the status can say so. A long prompt takes longer: then send the
        # headers, so that no proxy takes the service for hanging.
        await asyncio.wait([first], timeout=STATUS_WITHIN_S)
        if first.done():
            first.result()
        await sse.start()
        return await _stream_started(sse, call, live, first, events)


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


async def _stream_started(
    sse: SseResponse,
    call: Call,
    live: LiveRequest,
    first: asyncio.Future[tuple[int, Event]],
    events: AsyncIterator[tuple[int, Event]],
) -> web.StreamResponse:
    try:
        with sse.heartbeats():
            await _send_events(sse, call, live, await first, events)
        await sse.send_done()
    # No [DONE] after an error: it means that the answer is complete.
    except InvalidArgumentError as error:
        await sse.send(error_json(error_with_json_names(call.field_to_json, error)))
    except QuireError as error:
        await sse.send(error_json(error))
    except ClientConnectionResetError:
        raise  # the client is gone
    except Exception:
        log.exception("stream_failed", request_id=call.request_id)
        await sse.send(error_json(QuireError("internal error")))
    await sse.end()
    return sse.response


async def _send_events(
    sse: SseResponse,
    call: Call,
    live: LiveRequest,
    first: tuple[int, Event],
    events: AsyncIterator[tuple[int, Event]],
) -> None:
    head = _head(call, live, call.shape.chunk_object_name)
    usages: list[Usage] = []
    position = StreamPosition(live.request_id, call.received or {})
    has_ids = call.is_resumable
    num_tokens = position.num_tokens

    def usage_so_far() -> Json:
        match call.usage_in_stream:
            case UsageInStream.NEVER:
                return {}
            case UsageInStream.AT_END:
                return {"usage": None}
        num_prompt_tokens = sum(map(len, call.prompts))
        return {"usage": usage_json([Usage(num_prompt_tokens, num_tokens, cached_tokens=0)])}

    async def send(i: int, event: Event) -> None:
        nonlocal num_tokens
        if isinstance(event, Usage):
            usages.append(event)
            return
        if isinstance(event, PromptScores):
            for index in range(i * call.n, (i + 1) * call.n):
                call.shape.score(index, event)
            return
        index = i * call.n + event.output_index
        if isinstance(event, OutputDelta):
            num_tokens += len(event.token_ids)
            choice = call.shape.delta(index, event)
        elif error := error_from_finished(event):
            raise error
        else:
            choice = call.shape.finish(index, event)
        event_id = position.advance(event) if has_ids else ""
        await sse.send(
            {**head, "choices": [choice], **call.shape.once(), **usage_so_far()}, event_id
        )

    await send(*first)
    async for i, event in events:
        await send(i, event)
    if call.usage_in_stream is not UsageInStream.NEVER:
        await sse.send({**head, "choices": [], "usage": usage_json(call.shown(usages))})


def _head(call: Call, live: LiveRequest, object_name: str) -> Json:
    return {
        "id": call.shape.id_prefix + call.request_id,
        "object": object_name,
        "created": int(live.created),
        "model": live.model,
    }
