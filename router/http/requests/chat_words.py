"""The names that errors use for the parts of a chat; each API's JSON has its own names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChatWords:
    """The names that one API's JSON has for the fields and values of a chat."""

    forms: Mapping[str, str]
    """Maps each form of structured output, such as "structured.regex", to the field that asks for
    this form."""
    path: Callable[[int], str] = "tools[{}].function".format
    """Returns the path, in the client's JSON, of the function with this index."""
    choice: str = "tool_choice"
    forced: str = '"required"'
    """The value with which the field `choice` forces a tool call."""
    alone: str = "parallel_tool_calls is false"
    """How a client asks for at most one call."""
    thinking: str = "thinking_budget"
    """The field that limits thinking."""
