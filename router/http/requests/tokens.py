"""POST /tokenize and /detokenize, with vLLM's fields."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from contract.errors import InvalidArgumentError
from router.http.answers.objects import Json
from router.http.errors import error_with_json_names
from router.http.requests.messages import (
    Message,
    Messages,
    check_continued,
    check_template_kwargs,
    for_template,
)
from router.http.requests.tools import MAX_TOOLS, Tool, show_tools
from router.http.strict_json import Listed, Schema
from router.request.inference import Inference

_OF_CHATS = (
    "add_generation_prompt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "tools",
)


class TokenizeBody(Schema):
    """A text, or a chat with its template's arguments."""

    model: str = ""
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """For a prompt, unset means true. For a chat, the field must not be true, because the template
    adds the special tokens."""
    return_token_strs: bool = False
    """Whether to return each token's text, too."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(default_factory=dict)]
    tools: Annotated[Listed[Tool], Field(default_factory=list, max_length=MAX_TOOLS)]

    async def token_ids(self, inference: Inference) -> list[int]:
        """Return the tokens of the prompt that a request with this text or chat would have.

        May raise QuireError.
        """
        if (self.prompt is None) == (self.messages is None):
            raise InvalidArgumentError("prompt", "or messages must be set, and not both")
        if self.messages is not None:
            return await self._chat_token_ids(inference, self.messages)
        for name in _OF_CHATS:
            if name in self.model_fields_set:
                raise InvalidArgumentError(name, "is set; with prompt it must be unset")
        try:
            return await inference.text.tokenize(
                self.model,
                self.prompt or "",
                add_special_tokens=self.add_special_tokens is not False,
            )
        except InvalidArgumentError as error:
            raise error_with_json_names({"text": "prompt"}, error) from error

    async def _chat_token_ids(self, inference: Inference, messages: Sequence[Message]) -> list[int]:
        check_template_kwargs(self.chat_template_kwargs)
        if self.add_special_tokens:
            raise InvalidArgumentError(
                "add_special_tokens",
                "is true; with messages it must be unset, because the template adds them",
            )
        kwargs: Mapping[str, Any] = self.chat_template_kwargs
        template = inference.text.chat_template(self.model, self.chat_template)
        if self.tools:
            kwargs = {**kwargs, "tools": show_tools(self.tools, template)}
        if self.continue_final_message:
            check_continued(messages)
            kwargs = {**kwargs, "continue_final_message": True}
        return await inference.text.tokenize_chat(
            self.model,
            for_template(messages),
            template,
            add_generation_prompt=not self.continue_final_message
            if self.add_generation_prompt is None
            else self.add_generation_prompt,
            **kwargs,
        )


class DetokenizeBody(Schema):
    """Token ids."""

    model: str = ""
    tokens: Listed[int]


async def tokenize(inference: Inference, body: TokenizeBody) -> Json:
    """Answer /tokenize; may raise QuireError."""
    token_ids = await body.token_ids(inference)
    return {
        "count": len(token_ids),
        "max_model_len": inference.model.info(body.model).max_model_len,
        "tokens": token_ids,
        "token_strs": [inference.text.token_text(token_id) for token_id in token_ids]
        if body.return_token_strs
        else None,
    }


async def detokenize(inference: Inference, body: DetokenizeBody) -> Json:
    """Answer /detokenize; the text has special tokens. May raise QuireError."""
    try:
        text = await inference.text.detokenize(body.model, body.tokens, skip_special_tokens=False)
    except InvalidArgumentError as error:
        raise error_with_json_names({"token_ids": "tokens"}, error) from error
    return {"prompt": text}
