"""The lines of a batch.

Each line becomes a turn: a stored call, whose result is a line of a result file.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar, cast

import grpc
from pydantic import ValidationError

from contract.errors import InvalidArgumentError, QuireError
from contract.outputs import Event, OutputDelta, OutputFinished, Usage
from contract.request import MAX_PRIORITY, GenerateRequest
from router.http.answers.answer import ClientCall, whole_json
from router.http.answers.objects import CollectedOutput, Json
from router.http.batches.store import Batch
from router.http.body import MAX_PARSED_AT_ONCE_BYTES
from router.http.embeddings import EmbeddingsBody, embed
from router.http.errors import error_from_finished, error_from_validation, error_json
from router.http.openai_responses.body import ResponseBody
from router.http.openai_responses.call import ResponseCall, head_of, output_text, prepare
from router.http.requests.chat import ChatBody, chat_call
from router.http.requests.completions import CompletionBody, completion_call
from router.http.strict_json import Schema, json_bytes, parse_json
from router.live.usage import Used
from router.request.cells import Cells
from router.request.inference import Inference
from router.stored_turns.turn import Turn, TurnAnswer, TurnStatus

T = TypeVar("T")

KIND: Final = "batch line"
EMBEDDINGS_KIND: Final = "batch embeddings"
_EMBEDDINGS: Final = "/v1/embeddings"
_MAX_INPUTS_AT_ONCE: Final = 4
"""At most this many inputs of one line are computed at the same time. This limit leaves room for
other calls."""
_MAX_NUMBERS: Final = 2**18
"""Limit on the numbers in one line's embeddings, about 5.5 MB of JSON. There is a limit because a
router holds the answers of many lines in memory."""

ENDPOINTS: Final[Mapping[str, type[Schema]]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponseBody,
    _EMBEDDINGS: EmbeddingsBody,
}

_UNSUPPORTED: Final = (
    "stream",
    "background",
    "previous_response_id",
    "store",
    "echo",
    "prompt_logprobs",
    "return_token_ids",
)
"""Fields that a batch's line must not set. Some, such as `stream`, make no sense in a batch. The
others, such as `prompt_logprobs`, ask for data that a stored turn does not have."""

_CLIENTS_FAULT: Final = (
    grpc.StatusCode.INVALID_ARGUMENT.value[0],
    grpc.StatusCode.UNIMPLEMENTED.value[0],
)
_OK: Final = 200
_BAD_REQUEST: Final = 400


@dataclass(frozen=True, slots=True)
class BatchLines:
    """The `TurnKind` that makes the requests and results of batch lines."""

    cells: Cells

    async def answer(self, turn: Turn) -> TurnAnswer | None:
        """Return the result of a line for embeddings; None for other lines.

        If the router dies, another router computes the embeddings again.
        """
        if turn.kind != EMBEDDINGS_KIND:
            return None
        body = await _off_loop(turn, _body_of)
        assert isinstance(body, EmbeddingsBody), "the kind says so"
        requests = [
            replace(
                request,
                tenant=turn.tenant,
                priority=turn.priority,
                deadline=_deadline(turn),
            )
            for request in body.requests(body.input, turn.id, {}, special=body.add_special_tokens)
        ]
        inference = await self.cells.use(turn.model, is_patient=True)
        answer = await embed(
            inference,
            body,
            requests,
            max_at_once=_MAX_INPUTS_AT_ONCE,
            max_numbers=_MAX_NUMBERS,
        )

        def made() -> TurnAnswer:
            told = answer()
            num_tokens = cast(Json, told["usage"])["prompt_tokens"]
            assert isinstance(num_tokens, int), "`embed` counts tokens"
            return TurnAnswer(line(turn, status_code=_OK, body=told), Used(1, num_tokens))

        return await asyncio.to_thread(made)

    async def request(self, turn: Turn) -> GenerateRequest:
        """Return the request of a line; raises QuireError if the line's body is invalid."""
        call = await self._call(turn, self.cells.of(turn.model))
        if isinstance(call, ClientCall):
            if len(call.requests) > 1:
                raise InvalidArgumentError("prompt", "is a list; a batch line takes one prompt")
            request = call.requests[0]
        else:
            request = call.planned
        return replace(
            request,
            tenant=turn.tenant,
            priority=turn.priority,
            deadline=_deadline(turn),
        )

    async def result(
        self, turn: Turn, status: TurnStatus, events: Sequence[Event], at: float
    ) -> bytes:
        """Return a line of the output file or of the error file."""
        if status is TurnStatus.COMPLETED:
            code, body = _OK, await self._answer(turn, events, at)
        else:
            code, error = _failure(events)
            body = error_json(error)
        return await _off_loop(turn, lambda turn: line(turn, status_code=code, body=body))

    def failure(self, turn: Turn, error: QuireError) -> bytes:
        """Return a line of the error file, for a request that cannot be answered."""
        return line(turn, status_code=error.http_status, body=error_json(error))

    async def _call(self, turn: Turn, inference: Inference) -> ClientCall | ResponseCall:
        body = await _off_loop(turn, _body_of)
        if isinstance(body, ChatBody):
            return await chat_call(inference, body, turn.id)
        if isinstance(body, CompletionBody):
            return completion_call(inference, body, turn.id)
        assert isinstance(body, ResponseBody), "there are no other endpoints"
        body.check()
        model = inference.model.info(body.model).id
        head = head_of(body, f"resp_{turn.id}", turn.created_at, model, store=False)
        return await prepare(inference, body, head)

    async def _answer(self, turn: Turn, events: Sequence[Event], at: float) -> Json:
        inference = await self.cells.known(turn.model)
        call = await self._call(turn, inference)
        if isinstance(call, ResponseCall):
            made = call.events(inference)
            for event in events:
                made.take(event, lambda: at)
            return made.response
        (request,) = call.requests
        model = inference.model.info(request.model)
        outputs, usages = [CollectedOutput() for _ in range(call.n)], []
        texts = [output_text(inference, request) for _ in range(call.n)]
        for event in events:
            match event:
                case OutputDelta(output_index=index):  # only tokens are stored, not their text
                    text = "".join(map(texts[index].push, event.token_ids))
                    outputs[index].add(event._replace(text=text))
                case OutputFinished(output_index=index):
                    outputs[index].texts.append(texts[index].flush())
                    outputs[index].finished = event
                case Usage():
                    usages.append(event)
        return whole_json(call, outputs, usages, created=int(turn.created_at), model=model.id)


async def _off_loop(turn: Turn, work: Callable[[Turn], T]) -> T:
    """Return `work(turn)`; for a large turn, whose line takes long to parse, use a thread."""
    if len(turn.body) <= MAX_PARSED_AT_ONCE_BYTES:
        return work(turn)
    return await asyncio.to_thread(work, turn)


def _body_of(turn: Turn) -> Schema:
    """Return the field `body` of a turn's line, validated; may raise InvalidArgumentError."""
    asked = parse_line(turn.body)
    for field in _UNSUPPORTED:
        if asked["body"].get(field):
            raise InvalidArgumentError(field, "is set; in a batch it must be unset")
    try:
        return ENDPOINTS[asked["url"]].model_validate(asked["body"])
    except ValidationError as error:
        raise error_from_validation(error) from error


def parse_line(text: bytes) -> dict[str, Any]:
    """Return a line's custom_id, method, url and body; may raise InvalidArgumentError."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise InvalidArgumentError("line", "is not a JSON object")
    for name, kind in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
        if not isinstance(value.get(name), kind):
            raise InvalidArgumentError(name, "is missing or has the wrong type")
    if value["method"] != "POST":
        raise InvalidArgumentError("method", f'is {value["method"]!r}; it must be "POST"')
    return value


def turn_of_line(batch: Batch, number: int, text: bytes) -> Turn:
    asked = parse_line(text)
    model = asked["body"].get("model")
    return Turn(
        id=f"{batch.id}_{number}",
        tenant=batch.tenant,
        key_name=batch.key_name,
        kind=EMBEDDINGS_KIND if asked["url"] == _EMBEDDINGS else KIND,
        body=text,
        created_at=batch.created_at,
        model=model if isinstance(model, str) else "",
        group=batch.id,
        position=number,
        priority=-MAX_PRIORITY,
    )


def line(turn: Turn, *, status_code: int, body: Json) -> bytes:
    """Return a result line that has a response."""
    response = {"status_code": status_code, "request_id": turn.id, "body": body}
    return _line(turn, response, None)


def unanswered_line(turn: Turn, code: str, message: str) -> bytes:
    """Return a result line that has an error instead of a response."""
    return _line(turn, None, {"code": code, "message": message})


def _line(turn: Turn, response: Json | None, error: Json | None) -> bytes:
    custom_id = parse_line(turn.body)["custom_id"]
    told = {"id": f"batch_req_{turn.id}", "custom_id": custom_id}
    return json_bytes({**told, "response": response, "error": error})


def _failure(events: Sequence[Event]) -> tuple[int, QuireError]:
    for event in events:
        if isinstance(event, OutputFinished) and (error := error_from_finished(event)) is not None:
            is_clients = event.error is not None and event.error.code in _CLIENTS_FAULT
            return (_BAD_REQUEST if is_clients else error.http_status), error
    return QuireError.http_status, QuireError("the request failed")


def _deadline(turn: Turn) -> float:
    """Return the time, on the event loop's clock, at which the batch is `WINDOW_S` old."""
    left_s = turn.created_at + WINDOW_S - time.time()
    return asyncio.get_running_loop().time() + max(0.0, left_s)


WINDOW_S: Final = 86400.0
"""OpenAI's `completion_window`, which is always "24h", in seconds."""
