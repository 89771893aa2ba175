"""Answers one message: starts its request, and streams or collects the output."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from aiohttp import web

from contract.errors import InvalidArgumentError, QuireError
from contract.outputs import Event, OutputDelta, OutputFinished, Usage
from contract.request import GenerateRequest
from router.http.answers.objects import Json
from router.http.answers.sse import SseResponse, named_events, sse_of
from router.http.answers.streaming import stream
from router.http.anthropic import errors as anthropic
from router.http.anthropic.body import FIELD_TO_JSON, MessagesBody
from router.http.anthropic.content_events import ContentEvents, collected, usage_json
from router.http.anthropic.errors import error_json
from router.http.errors import REQUEST_ID_HEADER, error_from_finished, error_with_json_names
from router.http.requests.outputs import OutputPlan
from router.http.strict_json import json_bytes
from router.live.live_request import LiveRequest
from router.request.inference import Inference

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


@dataclass(frozen=True, slots=True)
class MessageCall:
    """One call of /v1/messages, and how its output is constrained and parsed (`plan`)."""

    request: GenerateRequest
    """The request without the constraints of `plan`."""
    plan: OutputPlan
    body: MessagesBody

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def named(self, error: QuireError) -> QuireError:
        """Return the error with the field's name as it is in the client's JSON."""
        if isinstance(error, InvalidArgumentError):
            return error_with_json_names({**FIELD_TO_JSON, **self.plan.field_to_json}, error)
        return error

    def new_content(self) -> ContentEvents:
        return ContentEvents(
            self.plan.new_reader, self.plan.stop, shows_thinking=self.body.shows_thinking
        )

    def end(self, content: ContentEvents, finished: OutputFinished, usage: Usage) -> Json:
        """Return the reason why the output ended."""
        is_context_full = usage.completion_tokens < self.body.max_tokens
        return content.stop_reason(finished, is_context_full=is_context_full)

    def head(self, live: LiveRequest) -> Json:
        """Return the JSON of a message whose content is still empty."""
        return {
            "id": f"msg_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "model": live.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_json(replace(live.usage, completion_tokens=0)),
        }


async def answer_message(
    http: web.Request, inference: Inference, call: MessageCall
) -> web.StreamResponse:
    """Answer the call. When this function ends, in any way, the call's request has ended."""
    try:
        async with await inference.generate(call.plan.applied_to(call.request)) as live:
            if call.body.stream:
                return await _stream(http, call, live)
            return await _collect(call, live)
    except InvalidArgumentError as error:
        raise call.named(error) from error


async def _collect(call: MessageCall, live: LiveRequest) -> web.Response:
    texts: list[str] = []
    finished, usage = None, None
    async for event in live:
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
        headers={anthropic.REQUEST_ID_HEADER: call.request_id},
    )


def stream_headers(request_id: str) -> dict[str, str]:
    """Return the headers of a stream."""
    return dict.fromkeys((REQUEST_ID_HEADER, anthropic.REQUEST_ID_HEADER), request_id)


async def _stream(http: web.Request, call: MessageCall, live: LiveRequest) -> web.StreamResponse:
    sse = sse_of(http, stream_headers(call.request_id), _PING)

    def head() -> bytes:
        return named_events([{"type": "message_start", "message": call.head(live)}]) + _PING

    async def fail(error: QuireError) -> None:
        await sse.send_named([error_json(call.named(error), call.request_id)])

    sending = _send_content(sse, call, live)
    return await stream(sse, sending, fail, request_id=call.request_id, head=head)


async def _send_content(sse: SseResponse, call: MessageCall, events: AsyncIterator[Event]) -> None:
    content = call.new_content()
    finished = None
    async for event in events:
        match event:
            case OutputDelta():
                await sse.send_named(list(content.push(event.text)))
            case OutputFinished():
                if error := error_from_finished(event):
                    raise error
                finished = event
            case Usage():
                assert finished is not None, "the usage follows the end"
                end: Json = {
                    "type": "message_delta",
                    "delta": call.end(content, finished, event),
                    "usage": usage_json(event),
                }
                await sse.send_named([*content.finish(finished), end, {"type": "message_stop"}])
