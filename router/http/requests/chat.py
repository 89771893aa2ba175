"""POST /v1/chat/completions: the body, and its conversion to a `ClientCall`."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field

from contract.errors import InvalidArgumentError
from router.http.answers.answer import ClientCall
from router.http.answers.chat_shape import ChatShape
from router.http.requests.chat_words import ChatWords
from router.http.requests.conversation import Conversation, Effort
from router.http.requests.messages import (
    Messages,
    check_continued,
    check_template_kwargs,
    for_template,
)
from router.http.requests.shared_fields import MAX_TOP_LOGPROBS, UNIMPLEMENTED, Body
from router.http.requests.tools import ToolFields
from router.http.strict_json import Schema
from router.request.inference import Inference

MAX_THINKING_BUDGET = 2**20

ThinkingBudget = Annotated[int, Field(ge=0, le=MAX_THINKING_BUDGET)]


class Reasoning(Schema):
    """OpenRouter's `reasoning`."""

    unimplemented = MappingProxyType({"exclude": (False,), "enabled": (True,)})

    effort: Effort | None = None
    max_tokens: ThinkingBudget | None = None


class ChatBody(ToolFields, Body):
    """POST /v1/chat/completions."""

    unimplemented = MappingProxyType(
        {
            **UNIMPLEMENTED,
            "functions": ([],),
            "function_call": ("none",),
            "modalities": (["text"],),
            "audio": (),
            "prediction": (),
            "verbosity": (),
            "web_search_options": (),
            "add_special_tokens": (False,),
            "documents": ([],),
            "echo": (False,),
        }
    )

    messages: Messages
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    prompt_logprobs: int | None = None
    chat_template: str | None = None
    """Replaces the model's template. The router refuses it without
    `--trust-request-chat-template`."""
    chat_template_kwargs: Annotated[dict[str, Any], Field(default_factory=dict)]
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the header of the assistant's message; None: yes, unless outputs
    continue a message."""
    continue_final_message: bool = False
    """Whether outputs continue the last message, which must be the assistant's."""
    reasoning_effort: Effort | None = None
    """How much to think. A request is refused if the chat template does not support this."""
    reasoning: Reasoning | None = None
    thinking_budget: ThinkingBudget | None = None
    """Limit on thinking tokens; at the limit, a grammar forces the marker that ends thinking."""
    thinking_token_budget: ThinkingBudget | None = None
    """vLLM's name for `thinking_budget`."""

    @property
    def _budgets(self) -> Mapping[str, int]:
        """Maps each field that sets the thinking budget to the field's value."""
        named = {
            "thinking_budget": self.thinking_budget,
            "thinking_token_budget": self.thinking_token_budget,
            "reasoning.max_tokens": None if self.reasoning is None else self.reasoning.max_tokens,
        }
        return {field: budget for field, budget in named.items() if budget is not None}

    @property
    def budget(self) -> int | None:
        """The thinking budget; raises InvalidArgumentError if two fields set different budgets."""
        given = list(self._budgets.items())
        for (field, budget), (other, its_budget) in pairwise(given):
            if budget != its_budget:
                raise InvalidArgumentError(
                    field, f"is {budget}, but {other} is {its_budget}; both must be equal"
                )
        return given[0][1] if given else None

    @property
    def conversation(self) -> Conversation:
        """The chat as a `Conversation`, which all HTTP APIs use."""
        kwargs: dict[str, Any] = dict(self.chat_template_kwargs)
        if self.add_generation_prompt is False or self.continue_final_message:
            kwargs["add_generation_prompt"] = False
        if self.continue_final_message:
            kwargs["continue_final_message"] = True
        effort = self.reasoning_effort
        if effort is None and self.reasoning is not None:
            effort = self.reasoning.effort
        return Conversation(
            model=self.model,
            messages=for_template(self.messages),
            tools=self,
            form=self.structured(),
            thinking_budget=self.budget,
            effort=effort,
            words=ChatWords(
                forms=self.structured_field_to_json,
                thinking=next(iter(self._budgets), "thinking_budget"),
            ),
            continued=self.messages[-1].text if self.continue_final_message else "",
            template_kwargs=kwargs,
            chat_template=self.chat_template,
        )

    def check(self) -> None:
        """Check fields against each other; may raise InvalidArgumentError."""
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidArgumentError(
                "top_logprobs", f"is {self.top_logprobs}; it needs logprobs to be true"
            )
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise InvalidArgumentError(
                "max_tokens",
                f"is {self.max_tokens}; it must equal max_completion_tokens, "
                f"which is {self.max_completion_tokens}, or be absent",
            )
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise InvalidArgumentError(
                    "add_generation_prompt", "is true; with continue_final_message it must be unset"
                )
            check_continued(self.messages)
        check_template_kwargs(self.chat_template_kwargs)


async def chat_call(inference: Inference, body: ChatBody, request_id: str) -> ClientCall:
    """Make the `ClientCall` for a body; may raise QuireError."""
    body.check()
    prompt, plan = await body.conversation.prepare(inference)
    field_to_json = {
        **body.beam_field_to_json,
        **body.structured_field_to_json,
        **plan.field_to_json,
        "prompt": "messages",
        "logprobs": "top_logprobs",
    }
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        max_tokens = body.max_completion_tokens
        field_to_json["max_tokens"] = "max_completion_tokens"
    request = body.to_request(
        prompt,
        request_id=request_id,
        sampling=body.sampling(
            max_tokens=max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
        ),
        add_special_tokens=False,  # the template has written the special tokens
    )
    prompts: list[Sequence[int]] = []
    return ClientCall(
        request_id=request_id,
        requests=[plan.applied_to(request)],
        n=body.n,
        shape=ChatShape(
            body.shown_tokens(inference.text),
            inference.text.token_bytes,
            has_logprobs=body.logprobs,
            has_prompt_logprobs=body.prompt_logprobs is not None,
            has_token_ids=body.return_token_ids,
            prompt_token_ids=lambda: prompts[0],
            new_reader=plan.new_reader,
            # With the client's flag, the text has these strings, and the reader has read them.
            stop=() if body.include_stop_str_in_output else plan.stop,
        ),
        prompts=prompts,
        stream=body.stream,
        usage_in_stream=body.usage_in_stream,
        field_to_json=field_to_json,
    )
