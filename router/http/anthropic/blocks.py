"""The messages and content blocks of Anthropic's API, and their conversion to a chat."""

from collections.abc import Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from contract.errors import InvalidArgumentError
from contract.request import MAX_MESSAGES
from router.http.requests import messages as chat
from router.http.strict_json import Listed, Schema, at_most, json_bytes

_NO_PROMPT = "x-anthropic-billing-header:"
"""The beginning of the system block in which Claude Code sends its version.

The chat leaves this block out. The block differs between sessions, so with it the prompts of two
sessions would share no prefix.
"""


def _as_blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class CacheControl(Schema):
    """A mark on a block: the client expects later prompts to be the same up to the block's end."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"

    @property
    def ttl_s(self) -> float:
        return 300.0 if self.ttl == "5m" else 3600.0


class CacheMarked(Schema):
    """A block that may have a cache mark."""

    cache_control: CacheControl | None = None


class TextBlock(CacheMarked):
    """A text."""

    unimplemented = MappingProxyType({"citations": ([],)})

    type: Literal["text"]
    text: str


class ThinkingBlock(Schema):
    """The assistant's earlier thinking."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""
    """Ignored: thinking is not verified."""


class ToolUseBlock(CacheMarked):
    """A tool call that the assistant made."""

    unimplemented = MappingProxyType({"caller": ({"type": "direct"},), "toolset_name": ()})

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(CacheMarked):
    """The result of a tool call."""

    unimplemented = MappingProxyType({"toolset_name": ()})

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1)]
    content: Annotated[
        Listed[TextBlock],
        BeforeValidator(_as_blocks),
        Field(default_factory=list),
    ]
    is_error: bool = False


Block: TypeAlias = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]

_ROLE_TO_BLOCKS: dict[str, tuple[type[Schema], ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


class Message(Schema):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Listed[Block], BeforeValidator(_as_blocks)]


Messages = Annotated[Listed[Message], at_most(MAX_MESSAGES), Field(min_length=1)]
System = Annotated[Listed[TextBlock], BeforeValidator(_as_blocks), Field(default_factory=list)]


def chat_messages(system: Sequence[TextBlock], messages: Sequence[Message]) -> list[chat.Message]:
    """Return the chat, in which each tool result is a separate message.

    Raises:
        InvalidArgumentError: A block does not fit its role, or a message has no content.
    """
    said = [block for block in system if not block.text.startswith(_NO_PROMPT)]
    listed = [_message("system", said)] if said else []
    for i, message in enumerate(messages):
        for new in _chat_messages(f"messages[{i}]", message):
            if listed and new.role == "user" == listed[-1].role:  # these are one turn of the user
                before = listed.pop().content or []
                new = chat.Message.model_construct(  # noqa: PLW2901 - the whole turn
                    role="user", content=[*before, *(new.content or ())]
                )
            listed.append(new)
    return listed


def ends_with_assistant(messages: Sequence[Message]) -> bool:
    """Whether the last message is the assistant's, so that the output continues it.

    Raises:
        InvalidArgumentError: The last message is the assistant's, and has blocks other than text.
    """
    last = messages[-1]
    if last.role != "assistant":
        return False
    if not all(isinstance(block, TextBlock) for block in last.content):
        raise InvalidArgumentError(
            f"messages[{len(messages) - 1}]",
            "is the last message, which the output continues; it must have only text",
        )
    return True


def cache_marks(messages: Iterable[Message]) -> Iterator[CacheMarked]:
    """Yield the blocks that may have a cache mark."""
    for message in messages:
        for block in message.content:
            if isinstance(block, CacheMarked):
                yield block
            if isinstance(block, ToolResultBlock):
                yield from block.content


def _chat_messages(field: str, message: Message) -> Iterator[chat.Message]:
    if not message.content:
        raise InvalidArgumentError(f"{field}.content", "is empty")
    for j, block in enumerate(message.content):
        if not isinstance(block, _ROLE_TO_BLOCKS[message.role]):
            raise InvalidArgumentError(
                f"{field}.content[{j}].type",
                f'is "{block.type}", which messages with role "{message.role}" cannot have',
            )
    if message.role != "user":
        yield _message(message.role, message.content)
        return
    texts: list[TextBlock] = []
    for block in message.content:
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolResultBlock):
            if texts:
                yield _message("user", texts)
                texts = []
            yield _tool_message(block)
    if texts:
        yield _message("user", texts)


def _message(role: str, blocks: Iterable[Block]) -> chat.Message:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block:
            case TextBlock():
                texts.append(chat.TextPart.model_construct(type="text", text=block.text))
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                calls.append(_call(block))
    return chat.Message.model_construct(
        role=role, content=texts, reasoning="".join(thoughts), tool_calls=calls
    )


def _call(block: ToolUseBlock) -> chat.ToolCall:
    arguments = json_bytes(block.input).decode()
    function = chat.CalledFunction.model_construct(name=block.name, arguments=arguments)
    return chat.ToolCall.model_construct(id=block.id, type="function", function=function)


def _tool_message(block: ToolResultBlock) -> chat.Message:
    texts = [part.text for part in block.content]
    if block.is_error:  # chat templates have no field for errors
        texts = ["Error: " + "\n".join(texts)]
    return chat.Message.model_construct(
        role="tool",
        content=[chat.TextPart.model_construct(type="text", text=text) for text in texts],
        tool_call_id=block.tool_use_id,
    )
