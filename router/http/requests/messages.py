"""The messages of a chat: their JSON, and the objects that a chat template gets."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import from_json

from contract.errors import InvalidArgumentError
from contract.request import MAX_MESSAGES
from router.http.strict_json import Listed, Schema, at_most, check_num_parts, excerpt

_TEMPLATE_NAMES = frozenset(
    {
        "self",
        "model",
        "messages",
        "template",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
    }
)


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextPart(Schema):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(Schema):
    """A function call: name, and arguments as the text of a JSON object, which may be cut short."""

    name: str
    arguments: str


class ToolCall(Schema):
    """A call that a model made."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(Schema):
    """One message of a chat."""

    unimplemented = MappingProxyType(
        {
            "function_call": (),
            "audio": (),
            "refusal": (),
            "annotations": ([],),
        }
    )

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Listed[TextPart] | None, BeforeValidator(_as_parts)] = None
    name: str = ""
    tool_calls: Annotated[Listed[ToolCall], Field(default_factory=list)]
    """The calls that the assistant made."""
    reasoning_content: str = ""
    """The assistant's earlier thinking."""
    reasoning: str = ""
    """The newer name of `reasoning_content`."""
    tool_call_id: str = ""
    """The id of the call whose result this message is; only with role "tool"."""

    @property
    def thought(self) -> str:
        return self.reasoning or self.reasoning_content

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or ())

    def for_template(self, field: str) -> dict[str, Any]:
        """Return the message for a chat template; the arguments of calls become objects.

        Raises InvalidArgumentError for fields that contradict each other. The error calls the
        message `field`.
        """
        self._check(field)
        message: dict[str, Any] = {
            # OpenAI's newer name; templates use the older one.
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        if self.thought:  # each template uses one of these names
            message |= {"reasoning_content": self.thought, "reasoning": self.thought}
            if not self.text:
                message["thinking"] = self.thought
        if self.name:
            message["name"] = self.name
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    "function": {
                        "name": call.function.name,
                        "arguments": _parse_arguments(
                            call.function.arguments,
                            f"{field}.tool_calls[{i}].function.arguments",
                        ),
                    },
                }
                for i, call in enumerate(self.tool_calls)
            ]
        return message

    def _check(self, field: str) -> None:
        if self.tool_calls and self.role != "assistant":
            raise InvalidArgumentError(
                f"{field}.tool_calls", f'is set; with role "{self.role}" it must be unset'
            )
        if (self.tool_call_id != "") != (self.role == "tool"):
            raise InvalidArgumentError(
                f"{field}.tool_call_id",
                f"is {excerpt(self.tool_call_id)}; it must be set with role "
                f'"tool" and only with it; role is "{self.role}"',
            )
        if self.thought and self.role != "assistant":
            raise InvalidArgumentError(
                f"{field}.reasoning", f'is set; with role "{self.role}" it must be unset'
            )
        if self.content is None and not self.tool_calls and not self.thought:
            raise InvalidArgumentError(f"{field}.content", "is missing")


Messages = Annotated[Listed[Message], at_most(MAX_MESSAGES), Field(min_length=1)]
"""All messages of a chat."""


def for_template(messages: Iterable[Message]) -> Iterator[dict[str, Any]]:
    """Check each message, and yield it for a chat template; may raise InvalidArgumentError.

    Callers iterate in a thread, because the arguments of calls are parsed, which may take long.
    """
    for i, message in enumerate(messages):
        yield message.for_template(f"messages[{i}]")


def check_continued(messages: Sequence[Message]) -> None:
    """Check that the last message can be continued; may raise InvalidArgumentError."""
    last = messages[-1]
    if last.role != "assistant" or last.tool_calls or not last.text:
        raise InvalidArgumentError(
            "continue_final_message",
            "is true; the last message must be the assistant's, with content and without calls",
        )


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raise InvalidArgumentError if an argument has a name that the service itself sets."""
    if taken := kwargs.keys() & _TEMPLATE_NAMES:
        raise InvalidArgumentError(
            "chat_template_kwargs", f"has the key {min(taken)}, which the service itself sets"
        )


def _parse_arguments(arguments: str, field: str) -> dict[str, Any]:
    """Return the arguments of an earlier call; if they were cut short, the complete part.

    The arguments are cut short if the output ended within them. Most templates take arguments only
    as an object, so the text must be parsed. To refuse the call would end the conversation, because
    each later turn contains the call, too.

    Raises InvalidArgumentError if the arguments exceed a limit of `check_num_parts`.
    """
    text = arguments.encode()
    try:
        check_num_parts(text)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(field, error.problem) from None
    try:
        value = from_json(text, allow_partial=True)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}
