"""Items of a response's input and output, and their conversion to messages of a chat."""

import base64
import uuid
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from contract.errors import InvalidArgumentError
from contract.request import MAX_MESSAGES
from router.http.answers.objects import Json
from router.http.openai_responses.tools import grouped_name
from router.http.openai_responses.variants import parse_variant
from router.http.requests.messages import CalledFunction, Message, TextPart, ToolCall
from router.http.strict_json import Listed, Schema, excerpt

_STATUS = Literal["in_progress", "completed", "incomplete"]
_AUTHORS: dict[str, Any] = {"user": "user", "assistant": "assistant", "system": "system"}
_AUTHORS["developer"] = "system"  # OpenAI's newer name; templates use the older one


class _InputText(Schema):
    """A piece of text in an input message."""

    unimplemented = MappingProxyType({"prompt_cache_breakpoint": ()})

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[Listed[Any], Field(default_factory=list)]
    logprobs: Annotated[Listed[Any], Field(default_factory=list)]


class _Refusal(Schema):
    """A refusal that another service's model wrote; Quire treats it as text."""

    type: Literal["refusal"]
    refusal: str


def _as_parts(value: object) -> object:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


_Text = Annotated[
    Listed[Annotated[_InputText | _Refusal, Field(discriminator="type")]],
    BeforeValidator(_as_parts),
]


def _text_of(parts: Sequence[_InputText | _Refusal]) -> str:
    return "\n".join(part.text if isinstance(part, _InputText) else part.refusal for part in parts)


class MessageItem(Schema):
    """A message of the user, the assistant, the developer or the system."""

    prefix: ClassVar[str] = "msg_"

    type: Literal["message"] = "message"
    id: str = ""
    role: Literal["user", "assistant", "system", "developer"]
    content: _Text
    status: _STATUS = "completed"
    phase: Literal["commentary", "final_answer"] | None = None

    @property
    def author(self) -> Literal["user", "assistant", "system"]:
        author: Literal["user", "assistant", "system"] = _AUTHORS[self.role]
        return author

    @property
    def text(self) -> str:
        return _text_of(self.content)

    def shown(self) -> Json:
        """Return the item's JSON, in OpenAI's format, without `id` and `status`."""
        kind = "output_text" if self.role == "assistant" else "input_text"
        more: Json = {"annotations": []} if self.role == "assistant" else {}
        content = [
            {"type": kind, "text": part.text, **more}
            if isinstance(part, _InputText)
            else part.model_dump()
            for part in self.content
        ]
        shown: Json = {"type": "message", "role": self.role, "content": content}
        return shown | {"phase": self.phase} if self.phase else shown


class CallItem(Schema):
    """A function call that the model made."""

    prefix: ClassVar[str] = "fc_"
    unimplemented = MappingProxyType({"caller": (), "async": (False,)})

    type: Literal["function_call"]
    id: str = ""
    call_id: str
    name: str
    namespace: str = ""
    """The function's group."""
    arguments: str
    status: _STATUS = "completed"

    def shown(self) -> Json:
        """Return the item's JSON, in OpenAI's format, without `id` and `status`."""
        group: Json = {"namespace": self.namespace} if self.namespace else {}
        return self.model_dump(include={"type", "call_id", "name", "arguments"}) | group


class CallOutputItem(Schema):
    """The result of a function call."""

    prefix: ClassVar[str] = "fco_"
    unimplemented = MappingProxyType({"namespace": (), "caller": (), "name": ()})

    type: Literal["function_call_output"]
    id: str = ""
    call_id: str
    output: _Text
    status: _STATUS = "completed"

    def shown(self) -> Json:
        """Return the item's JSON, in OpenAI's format, without `id` and `status`."""
        return {
            "type": self.type,
            "call_id": self.call_id,
            "output": _text_of(self.output),
        }


class _Thought(Schema):
    """A part of the model's thinking, or of a summary of it."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class ReasoningItem(Schema):
    """The model's thinking before its answer."""

    prefix: ClassVar[str] = "rs_"

    type: Literal["reasoning"]
    id: str = ""
    summary: Annotated[Listed[_Thought], Field(default_factory=list)]
    content: Annotated[Listed[_Thought], Field(default_factory=list)]
    encrypted_content: str = ""
    """The thinking as `sealed` encodes it, for clients that send back only this field."""
    status: _STATUS = "completed"

    @property
    def text(self) -> str:
        """The thinking; raises ValueError if another service wrote `encrypted_content`."""
        if not self.content and self.encrypted_content:
            return _opened(self.encrypted_content)
        return "\n".join(part.text for part in self.content or self.summary)

    def shown(self) -> Json:
        """Return the item's JSON, in OpenAI's format, without `id` and `status`."""
        return self.model_dump(include={"type", "summary", "content"}) | (
            {"encrypted_content": self.encrypted_content} if self.encrypted_content else {}
        )


Item: TypeAlias = MessageItem | CallItem | CallOutputItem | ReasoningItem

_KINDS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}


def parse_items(value: object) -> list[Item]:
    """Return the items of a body's `input`; raises QuireError that names the first invalid item."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise InvalidArgumentError("input", f"is {excerpt(value)}; it must be a string or a list")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise InvalidArgumentError(
            "input", f"has {len(value)} items; it must have 1 to {MAX_MESSAGES}"
        )
    return [
        item if isinstance(item, Item) else parse_variant(item, f"input[{i}]", _KINDS, "message")
        for i, item in enumerate(value)
    ]


def with_id(item: Item) -> Json:
    """Return the item's JSON, in OpenAI's format, with a new id if the client set none."""
    item_id = item.id or item.prefix + uuid.uuid4().hex
    return {"id": item_id, **item.shown(), "status": item.status}


def messages_of(
    instructions: str, items: Sequence[Item], own_from: int = 0
) -> Iterator[dict[str, Any]]:
    """Convert items to messages for a chat template.

    Consecutive thinking, text and calls of the assistant become one message. The `instructions` and
    the system messages at the start become one system message, because many templates take only
    one.

    The first `own_from` items are of earlier responses, the others are the request's `input`. An
    error in an item of an earlier response names the field `previous_response_id`. An error in the
    request's first item names `input[0]`, and so on.
    """
    said: list[tuple[str, Message]] = []  # each with its field's name
    if instructions:
        said.append(("instructions", _message("system", instructions)))
    for i, item in enumerate(items):
        field = f"input[{i - own_from}]" if i >= own_from else "previous_response_id"
        last = said[-1][1] if said else None
        added = _message_of(item, field)
        if last is not None and (joined := _joined(last, added, is_first=len(said) == 1)):
            said[-1] = (said[-1][0], joined)
        else:
            said.append((field, added))
    for field, message in said:
        yield message.for_template(field)


def _message_of(item: Item, field: str) -> Message:
    match item:
        case MessageItem():
            return _message(item.author, item.text)
        case CallItem():
            name = grouped_name(item.namespace, item.name)
            called = CalledFunction(name=name, arguments=item.arguments or "{}")
            call = ToolCall(id=item.call_id, type="function", function=called)
            return _message("assistant", None, tool_calls=[call])
        case CallOutputItem():
            return _message("tool", _text_of(item.output), tool_call_id=item.call_id)
        case ReasoningItem():
            try:
                return _message("assistant", "", reasoning=item.text)
            except ValueError:
                raise InvalidArgumentError(
                    f"{field}.encrypted_content", "was not written by this service"
                ) from None


def _message(role: str, text: str | None, **fields: Any) -> Message:
    content = None if text is None else [TextPart(type="text", text=text)]
    return Message.model_validate({"role": role, "content": content, **fields})


def _joined(last: Message, added: Message, *, is_first: bool) -> Message | None:
    """Return the two messages as one; None if they must stay two."""
    if last.role != added.role:
        return None
    if added.role == "system" and is_first:
        return _message("system", f"{last.text}\n\n{added.text}")
    if added.role != "assistant":
        return None
    if added.tool_calls:
        return last.model_copy(update={"tool_calls": [*last.tool_calls, *added.tool_calls]})
    if added.thought or last.text or last.tool_calls:
        return None  # a new turn begins
    return last.model_copy(update={"content": added.content})


def sealed(text: str) -> str:
    """Return thinking as `encrypted_content`: encoded, but not secret."""
    return base64.b64encode(text.encode()).decode()


def _opened(content: str) -> str:
    return base64.b64decode(content, validate=True).decode()
