"""One call of /v1/responses: its request, and the events that answer it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from contract.errors import InvalidArgumentError
from contract.request import GenerateRequest
from router.http.answers.objects import Json
from router.http.body import MAX_PARSED_AT_ONCE_BYTES
from router.http.errors import error_with_json_names
from router.http.openai_responses.body import FIELD_TO_JSON, ResponseBody
from router.http.openai_responses.events import OutputText, ResponseEvents
from router.http.openai_responses.items import Item
from router.http.openai_responses.truncation import truncated
from router.http.requests.outputs import OutputPlan
from router.live.stop_strings import StopMatcher
from router.request.inference import Inference
from router.schedulers.wire import record_from_bytes
from router.stored_turns.turn import Turn

_PROMPT_END = 64
"""How many of a prompt's last tokens to decode, to see whether the output begins within
thinking."""


@dataclass(frozen=True, slots=True)
class ResponseCall:
    """The parts from which the request and the events of one call are made."""

    head: Json
    """The response's fields that do not depend on the output."""
    request: GenerateRequest
    """The request without the changes that `plan` makes."""
    plan: OutputPlan
    body: ResponseBody

    @property
    def planned(self) -> GenerateRequest:
        return self.plan.applied_to(self.request)

    def named(self, error: InvalidArgumentError) -> InvalidArgumentError:
        """Return the error, with its field named as in the client's JSON."""
        return error_with_json_names({**FIELD_TO_JSON, **self.plan.field_to_json}, error)

    def events(self, inference: Inference) -> ResponseEvents:
        """Return an object that makes all events of the response from the output's tokens."""
        return ResponseEvents(
            self.head,
            output_text(inference, self.planned),
            None if self.plan.new_reader is None else self.plan.new_reader(),
            call_stop=self.plan.stop,
            token_text=inference.text.token_text,
            token_bytes=inference.text.token_bytes,
            has_logprobs=self.body.has_logprobs,
            seals_thinking=self.body.seals_thinking,
            name_to_group=self.body.name_to_group,
        )


def output_text(inference: Inference, request: GenerateRequest) -> OutputText:
    """Return an object that turns an output's tokens into the same text as `LiveOutput` does."""
    sampling, model = request.sampling, inference.model.info(request.model)
    ends = frozenset() if sampling.ignore_eos else frozenset(model.eos_token_ids)
    return OutputText(
        inference.text.detokenizer(skip_special_tokens=request.skip_special_tokens),
        StopMatcher(request.stop, include_in_output=request.include_stop_str_in_output),
        ends | frozenset(sampling.stop_token_ids),
    )


def head_of(
    body: ResponseBody, response_id: str, created_at: float, model: str, *, store: bool
) -> Json:
    """Return the response's fields that do not depend on the output."""
    return {
        "id": response_id,
        "created_at": int(created_at),
        **body.shown(model=model, store=store),
    }


async def prepare(
    inference: Inference, body: ResponseBody, head: Json, earlier: Sequence[Item] = ()
) -> ResponseCall:
    """Make the `ResponseCall` of a call with this body; may raise QuireError.

    `earlier`: the items of the response that the body continues, and of the responses before it.
    """
    if body.truncation == "auto":
        prompt, plan = await truncated(inference, body, earlier)
    else:
        prompt, plan = await body.conversation(earlier).prepare(inference)
    return ResponseCall(head, body.request(prompt, str(head["id"])), plan, body)


async def body_of(turn: Turn) -> ResponseBody:
    """Parse the body of a turn; a thread parses a large body."""
    if len(turn.body) <= MAX_PARSED_AT_ONCE_BYTES:
        return ResponseBody.model_validate_json(turn.body)
    return await asyncio.to_thread(ResponseBody.model_validate_json, turn.body)


async def restored(inference: Inference, turn: Turn) -> ResponseCall:
    """Return the call of a stored turn, so that the response's events can be made again."""
    body = await body_of(turn)
    head = head_of(body, turn.id, turn.created_at, turn.model, store=True)
    prompt = ""
    if turn.record is not None:
        token_ids = record_from_bytes(turn.record).record.prompt_token_ids[-_PROMPT_END:]
        prompt = b"".join(map(inference.text.token_bytes, token_ids)).decode(errors="replace")
    plan = await body.conversation().output_plan(inference, prompt)
    return ResponseCall(head, body.request(prompt, turn.id), plan, body)
