"""Answers one message: starts its request, and streams or collects the output."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from aiohttp import web

from contract.errors import InvalidArgumentError, QuireError
from contract.outputs import Event, OutputDelta, OutputFinished, Usage
from router.http.answers.merge import merge
from router.http.answers.objects import Json
from router.http.answers.sse import SseResponse
from router.http.answers.streaming import stream
from router.http.anthropic.content import ContentEvents, collected, usage_json
from router.http.anthropic.errors import REQUEST_ID_HEADER, error_json
from router.http.errors import error_from_finished, error_with_json_names
from router.http.requests.chat import PlannedChat
from router.http.strict_json import json_bytes
from router.request.inference import Inference
from router.request.live import LiveRequest

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


@dataclass(frozen=True, slots=True)
class MessageCall:
    """One call of /v1/messages."""

    planned: PlannedChat
    stream: bool
    max_tokens: int
    """As the client set it; the context may have less room."""
    shows_thinking: bool

    @property
    def request_id(self) -> str:
        return self.planned.request.request_id

    def new_content(self) -> ContentEvents:
        plan = self.planned.plan
        return ContentEvents(plan.new_reader, plan.stop, shows_thinking=self.shows_thinking)

    def end(self, content: ContentEvents, finished: OutputFinished, usage: Usage) -> Json:
        """Return why the output has ended."""
        is_context_full = usage.completion_tokens < self.max_tokens
        return content.stop_reason(finished, is_context_full=is_context_full)

    def head(self, live: LiveRequest) -> Json:
        """Return a message that is empty yet."""
        num_cached = live.num_cached_tokens or 0
        return {
            "id": f"msg_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "model": live.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_json(Usage(len(live.prompt_token_ids), 0, num_cached)),
        }


async def answer_message(
    http: web.Request, inference: Inference, call: MessageCall
) -> web.StreamResponse:
    """Answer the call. When this returns, raises or is cancelled, its request has ended."""
    try:
        async with (
            await inference.generate(call.planned.request) as live,
            aclosing(merge([live])) as events,
        ):
            if call.stream:
                return await _stream(http, call, live, events)
            return await _collect(call, live, events)
    except InvalidArgumentError as error:
        raise error_with_json_names(call.planned.field_to_json, error) from error


async def _collect(
    call: MessageCall, live: LiveRequest, events: AsyncIterator[tuple[int, Event]]
) -> web.Response:
    texts: list[str] = []
    finished, usage = None, None
    async for _, event in events:
        match event:
            case OutputDelta():
                texts.append(event.text)
            case OutputFinished():
                if error := error_from_finished(event):
                    raise error
                finished = event
            case Usage():
                usage = event
    assert finished is not None, "a request ended without finishing its output"
    assert usage is not None, "a request ended without its usage"
    content = call.new_content()
    blocks = collected([*content.push("".join(texts)), *content.finish(finished)])
    message = call.head(live) | {"content": blocks, "usage": usage_json(usage)}
    return web.Response(
        body=json_bytes(message | call.end(content, finished, usage)),
        content_type="application/json",
        headers={REQUEST_ID_HEADER: call.request_id},
    )


async def _stream(
    http: web.Request,
    call: MessageCall,
    live: LiveRequest,
    events: AsyncIterator[tuple[int, Event]],
) -> web.StreamResponse:
    async def send(value: Json) -> None:
        await sse.send(value, name=str(value["type"]))

    async def send_all(events: AsyncIterator[tuple[int, Event]]) -> None:
        await send({"type": "message_start", "message": call.head(live)})
        await send({"type": "ping"})
        content = call.new_content()
        finished = None
        async for _, event in events:
            match event:
                case OutputDelta():
                    for part in content.push(event.text):
                        await send(part)
                case OutputFinished():
                    if error := error_from_finished(event):
                        raise error
                    finished = event
                    for part in content.finish(event):
                        await send(part)
                case Usage():
                    assert finished is not None, "a request ended without finishing its output"
                    await send(
                        {
                            "type": "message_delta",
                            "delta": call.end(content, finished, event),
                            "usage": usage_json(event),
                        }
                    )
        await send({"type": "message_stop"})

    async def fail(error: QuireError) -> None:
        if isinstance(error, InvalidArgumentError):
            error = error_with_json_names(call.planned.field_to_json, error)
        await send(error_json(error, call.request_id))

    sse = SseResponse(http, {REQUEST_ID_HEADER: call.request_id}, _PING)
    return await stream(sse, events, send_all, fail, request_id=call.request_id)
