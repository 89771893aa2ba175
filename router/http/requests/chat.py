"""POST /v1/chat/completions: the body, and the call made of it by a chat template."""

from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field

from contract.errors import InvalidArgumentError
from router.http.requests.messages import Messages, check_template_kwargs, for_template
from router.http.requests.schema import UNIMPLEMENTED, Body
from router.http.requests.tools import ToolFields
from router.http.responses.answer import Call
from router.http.responses.chat_shape import ChatShape
from router.request.inference import Inference

MAX_TOP_LOGPROBS = 20


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
            "reasoning_effort": (),
            "verbosity": (),
            "web_search_options": (),
            "prompt_cache_retention": ("in_memory", "in-memory"),
            "add_generation_prompt": (True,),
            "add_special_tokens": (False,),
            "continue_final_message": (False,),
            "chat_template": (),
            "documents": ([],),
            "echo": (False,),
            "prompt_logprobs": (),
        }
    )

    messages: Messages
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(default_factory=dict)]

    def check(self) -> None:
        """Check fields against each other; raises InvalidArgumentError."""
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
        check_template_kwargs(self.chat_template_kwargs)


async def chat_call(inference: Inference, body: ChatBody, request_id: str) -> Call:
    """Make the call of a body; raises QuireError."""
    body.check()
    tools = body.tool_use(lambda: inference.text.chat_template(body.model))
    if tools is not None and tools.new_reader is not None and body.structured() is not None:
        raise InvalidArgumentError(
            "tool_choice",
            'is not "none"; it must be, with tools and a form that the output must have',
        )
    prompt = await inference.text.render_chat(
        body.model,
        for_template(body.messages),
        **body.chat_template_kwargs,
        **({} if tools is None else {"tools": tools.for_template}),
    )
    field_to_json = {
        **body.beam_field_to_json,
        **(body.structured_field_to_json if tools is None else tools.field_to_json),
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
    if tools is not None:
        request = tools.applied_to(request)
    return Call(
        request_id=request_id,
        requests=[request],
        n=body.n,
        shape=ChatShape(
            inference.text.token_text,
            inference.text.token_bytes,
            has_logprobs=body.logprobs,
            new_reader=None if tools is None else tools.new_reader,
        ),
        stream=body.stream,
        usage_in_stream=body.usage_in_stream,
        field_to_json=field_to_json,
    )
