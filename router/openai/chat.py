"""POST /v1/chat/completions: the body, and the call that it asks for by way of a chat template."""

from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from router.inference import Inference
from router.openai.answer import Call
from router.openai.json_object import Schema
from router.openai.responses import ChatShape
from router.openai.schema import UNIMPLEMENTED, Body
from rpc.errors import InvalidArgumentError

MAX_TOP_LOGPROBS = 20

_TEMPLATE_NAMES = frozenset({"self", "model", "messages", "add_generation_prompt"})


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextPart(Schema):
    """One piece of a message."""

    type: Literal["text"]
    text: str


class Message(Schema):
    """One message of a chat."""

    unimplemented = MappingProxyType(
        {
            "tool_calls": ([],),
            "tool_call_id": (),
            "function_call": (),
            "audio": (),
            "refusal": (),
            "annotations": ([],),
        }
    )

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_as_parts)]
    name: str = ""

    def for_template(self) -> dict[str, str]:
        """What a chat template sees."""
        message = {
            # OpenAI's newer word for the same; templates know the older.
            "role": "system" if self.role == "developer" else self.role,
            "content": "\n".join(part.text for part in self.content),
        }
        return message | {"name": self.name} if self.name else message


class ChatBody(Body):
    """POST /v1/chat/completions."""

    unimplemented = MappingProxyType(
        {
            **UNIMPLEMENTED,
            "tools": ([],),
            "tool_choice": ("none",),
            "parallel_tool_calls": (),
            "functions": ([],),
            "function_call": ("none",),
            "modalities": (["text"],),
            "audio": (),
            "prediction": (),
            "reasoning_effort": (),
            "verbosity": (),
            "web_search_options": (),
            "prompt_cache_key": (),
            "safety_identifier": (),
            "add_generation_prompt": (True,),
            "add_special_tokens": (False,),
            "continue_final_message": (False,),
            "chat_template": (),
            "documents": ([],),
            "echo": (False,),
            "prompt_logprobs": (),
        }
    )

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(default_factory=dict)]

    def check(self) -> None:
        """Check what concerns several fields; raises InvalidArgumentError."""
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
        if taken := self.chat_template_kwargs.keys() & _TEMPLATE_NAMES:
            raise InvalidArgumentError(
                "chat_template_kwargs", f"has the key {min(taken)}, which the service itself sets"
            )


async def chat_call(inference: Inference, body: ChatBody, request_id: str) -> Call:
    """The call that a body asks for; raises QuireError."""
    body.check()
    prompt = await inference.render_chat(
        body.model,
        [message.for_template() for message in body.messages],
        **body.chat_template_kwargs,
    )
    field_to_json = {
        **body.beam_field_to_json,
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
            max_tokens=max_tokens, logprobs=(body.top_logprobs or 0) if body.logprobs else None
        ),
        add_special_tokens=False,  # the template wrote them
    )
    return Call(
        request_id=request_id,
        requests=[request],
        n=body.n,
        shape=ChatShape(
            partial(inference.token_text, body.model),
            partial(inference.token_bytes, body.model),
            has_logprobs=body.logprobs,
        ),
        stream=body.stream,
        include_usage=body.include_usage,
        field_to_json=field_to_json,
    )
