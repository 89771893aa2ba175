"""Answers one call: starts its requests, and streams or collects their events."""

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Final

from aiohttp import web

from contract.errors import FailedPreconditionError, InvalidArgumentError, QuireError
from contract.outputs import Event, OutputDelta, OutputFinished, PromptScores, Usage
from contract.request import (
    MAX_STREAM_INTERVAL,
    GenerateRequest,
    OutputReceived,
    ResumeRequest,
)
from router.http.answers.event_ids import StreamPosition
from router.http.answers.objects import ChoiceShape, CollectedOutput, Json, usage_json
from router.http.answers.sse import SseResponse, sse_event, sse_of
from router.http.answers.streaming import stream
from router.http.errors import (
    REQUEST_ID_HEADER,
    error_from_finished,
    error_json,
    error_with_json_names,
)
from router.http.strict_json import json_bytes
from router.live.live_request import ClientRoom, LiveRequest
from router.request.inference import Inference

_STARTED_AT_ONCE: Final = 32
"""How many requests of a call `_read_all` starts to read in one turn of the event loop. More would
delay other calls, because each request may have many events to pass on at once."""


class UsageInStream(Enum):
    """Where a stream reports the usage."""

    NEVER = "never"
    AT_END = "at_end"
    ALWAYS = "always"
    """In every event: the usage up to the event."""


@dataclass(frozen=True, slots=True)
class ClientCall:
    """One client call, with one request per prompt and `n` outputs of each request.

    Output j of request i is choice `i * n + j`.
    """

    request_id: str
    requests: Sequence[GenerateRequest]
    n: int
    shape: ChoiceShape
    stream: bool
    usage_in_stream: UsageInStream
    received: Mapping[int, OutputReceived] | None = None
    """What the client has of each output, if the call resumes a stream; else None."""
    prompts: list[Sequence[int]] = field(default_factory=list)
    """The token ids of each request's prompt, once they are known."""
    field_to_json: Mapping[str, str] = field(default_factory=dict)
    """Maps fields of `GenerateRequest` to their names in the client's JSON, where these differ."""

    hides_outputs: bool = False
    """Whether the answer shows only prompts. If so, the usage counts no output tokens."""

    def shown(self, usages: Sequence[Usage]) -> Sequence[Usage]:
        """Return the usages to report: if `hides_outputs` is true, without output tokens."""
        if not self.hides_outputs:
            return usages
        return [replace(usage, completion_tokens=0) for usage in usages]

    @property
    def is_resumable(self) -> bool:
        """Whether the call's stream can be resumed from an event's id.

        An id names one request, so the call must have only one request. Prompt log-probabilities
        are sent only once, so the call must not ask for them.
        """
        return (
            self.stream
            and len(self.requests) == 1
            and self.requests[0].resumable
            and self.requests[0].sampling.prompt_logprobs is None
        )


async def answer(http: web.Request, inference: Inference, call: ClientCall) -> web.StreamResponse:
    """Answer the call. When this function ends, in any way, the call's requests have ended."""
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
            return await (_stream(http, call, lives) if call.stream else _collect(call, lives))
    except InvalidArgumentError as error:
        raise error_with_json_names(call.field_to_json, error) from error


async def _open(inference: Inference, call: ClientCall, request: GenerateRequest) -> LiveRequest:
    """Start a request, or resume it after the events that its client has received."""
    if not call.stream and not request.resumable:  # nothing is sent before the end
        request = replace(request, stream_interval=MAX_STREAM_INTERVAL)
    if call.received is None:
        return await inference.generate(request)
    return await inference.resume(
        ResumeRequest(
            request.request_id,
            inference.shared.tenant_of(request.tenant),
            call.received,
            has_prompt_scores=False,
            deadline=request.deadline,
        )
    )


def _catch_up(call: ClientCall, request: GenerateRequest, live: LiveRequest) -> None:
    """Bring `call.shape` up to date: pass it the text that the client already has.

    Raises `FailedPreconditionError` if log-probabilities of that text were lost.
    """
    for output in live.outputs:
        if (skipped := output.skipped) is None:
            continue
        if request.sampling.logprobs is not None and len(skipped.logprobs) < len(skipped.token_ids):
            raise FailedPreconditionError("log-probabilities of this stream were lost")
        call.shape.delta(output.index, skipped)


async def _collect(call: ClientCall, lives: Sequence[LiveRequest]) -> web.Response:
    outputs = [CollectedOutput() for _ in range(call.n * len(call.requests))]
    usages: list[Usage] = []

    def put(i: int, event: Event) -> None:
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

    await _read_all(lives, lambda i: partial(put, i))
    body = whole_json(call, outputs, usages, created=int(lives[0].created), model=lives[0].model)
    return web.Response(
        body=json_bytes(body),
        content_type="application/json",
        headers={REQUEST_ID_HEADER: call.request_id},
    )


def whole_json(
    call: ClientCall,
    outputs: Sequence[CollectedOutput],
    usages: Sequence[Usage],
    *,
    created: int,
    model: str,
) -> Json:
    """Return the whole answer to a call."""
    choices = []
    for index, output in enumerate(outputs):
        assert output.finished is not None, "a request ended without finishing each output"
        choices.append(call.shape.whole(index, output, output.finished))
    return {
        "id": call.shape.id_prefix + call.request_id,
        "object": call.shape.object_name,
        "created": created,
        "model": model,
        "choices": choices,
        **call.shape.once(),
        "usage": usage_json(call.shown(usages)),
    }


async def _stream(
    http: web.Request, call: ClientCall, lives: Sequence[LiveRequest]
) -> web.StreamResponse:
    sse = sse_of(http, {REQUEST_ID_HEADER: call.request_id})

    async def send() -> None:
        chunks = _Chunks(sse, call, lives[0])
        await _read_all(lives, chunks.sink, sse)
        chunks.put_usage()
        await sse.send_done()

    async def fail(error: QuireError) -> None:  # no [DONE], because the answer is incomplete
        if isinstance(error, InvalidArgumentError):
            error = error_with_json_names(call.field_to_json, error)
        await sse.send(error_json(error))

    return await stream(sse, send(), fail, request_id=call.request_id)


async def _read_all(
    lives: Sequence[LiveRequest],
    sink: Callable[[int], Callable[[Event], None]],
    room: ClientRoom | None = None,
) -> None:
    """Pass each event of request `i` to `sink(i)`; raise the first exception."""
    if len(lives) == 1:  # the usual case, which needs no task of its own
        await lives[0].send_to(sink(0), room)
        return
    try:
        async with asyncio.TaskGroup() as readers:
            for i, live in enumerate(lives):
                readers.create_task(live.send_to(sink(i), room))
                if (i + 1) % _STARTED_AT_ONCE == 0:
                    await asyncio.sleep(0)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


class _Chunks:
    """The SSE events of one stream.

    Nearly all events of a choice differ only in their text. So only a choice's first event is
    serialized as a whole. For the choice's later events, only the text is serialized, which takes a
    tenth of the time.
    """

    __slots__ = (
        "_call",
        "_frames",
        "_has_frames",
        "_head",
        "_is_text_only",
        "_mark",
        "_num_tokens",
        "_position",
        "_sse",
        "_usages",
    )

    def __init__(self, sse: SseResponse, call: ClientCall, live: LiveRequest) -> None:
        self._sse = sse
        self._call = call
        self._head = _head(call, live, call.shape.chunk_object_name)
        self._position: StreamPosition | None = None
        self._num_tokens = 0
        if call.is_resumable:
            self._position = StreamPosition(live.request_id, call.received or {})
            self._num_tokens = self._position.num_tokens
        self._usages: list[Usage] = []
        self._mark = uuid.uuid4().hex
        """A unique text: `_make_frame` serializes an event with it, and splits the event there."""
        self._has_frames = call.usage_in_stream is not UsageInStream.ALWAYS
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        """Maps a choice's index to a frame: an event's bytes before and after the text's JSON."""
        self._is_text_only = self._has_frames and self._position is None and call.shape.is_text_only
        """Whether a delta's event needs only the delta's text, once the choice has a frame. If so,
        the text is sent between the frame's two parts, without a call of `shape.delta`."""

    def sink(self, i: int) -> Callable[[Event], None]:
        """Return the function that sends an event of request `i`."""
        return self.put if i == 0 else partial(self.put, first_index=i * self._call.n)

    def put(self, event: Event, first_index: int = 0) -> None:
        """Send an event of the request whose first choice is `first_index`.

        Raises the error of an output that has failed.
        """
        if self._is_text_only and isinstance(event, OutputDelta):
            frame = self._frames.get(first_index + event.output_index)
            if frame is not None:
                self._sse.put_between(frame, json_bytes(event.text))
                return
        call = self._call
        choice: Json | str
        if isinstance(event, OutputDelta):
            index = first_index + event.output_index
            self._num_tokens += len(event.token_ids)
            choice = call.shape.delta(index, event)
        elif isinstance(event, OutputFinished):
            if error := error_from_finished(event):
                raise error
            index = first_index + event.output_index
            choice = call.shape.finish(index, event)
        elif isinstance(event, Usage):
            self._usages.append(event)
            return
        else:
            for index in range(first_index, first_index + call.n):
                call.shape.score(index, event)
            return
        if isinstance(choice, str) and self._has_frames:
            before, behind = self._frames.get(index) or self._make_frame(index)
            chunk = before + json_bytes(choice) + behind
        elif isinstance(choice, str):
            chunk = self._chunk(call.shape.choice_of_text(index, choice))
        else:
            chunk = self._chunk(choice)
        if self._position is not None:
            chunk = b"id: %b\n%b" % (self._position.advance(event).encode(), chunk)
        self._sse.put(chunk)

    def _make_frame(self, index: int) -> tuple[bytes, bytes]:
        chunk = self._chunk(self._call.shape.choice_of_text(index, self._mark))
        before, _, behind = chunk.partition(json_bytes(self._mark))
        self._frames[index] = before, behind
        return before, behind

    def put_usage(self) -> None:
        """Send the usage at the end, if the client wants it."""
        call = self._call
        if call.usage_in_stream is UsageInStream.NEVER:
            return
        usage = usage_json(call.shown(self._usages))
        self._sse.put(sse_event({**self._head, "choices": [], "usage": usage}))

    def _chunk(self, choice: Json) -> bytes:
        call = self._call
        usage: Json = {}
        match call.usage_in_stream:
            case UsageInStream.AT_END:
                usage = {"usage": None}
            case UsageInStream.ALWAYS:
                prompt_tokens = sum(map(len, call.prompts))
                usage = {"usage": usage_json([Usage(prompt_tokens, self._num_tokens, 0)])}
        return sse_event({**self._head, "choices": [choice], **call.shape.once(), **usage})


def _head(call: ClientCall, live: LiveRequest, object_name: str) -> Json:
    return {
        "id": call.shape.id_prefix + call.request_id,
        "object": object_name,
        "created": int(live.created),
        "model": live.model,
    }
