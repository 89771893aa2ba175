"""The names in each API's JSON for what all chats have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChatWords:
    """The names that an API's JSON has for fields of a chat and their values, for errors."""

    forms: Mapping[str, str]
    """Maps `structured.` and the kind of an output's form to the field that sets the form."""
    path: Callable[[int], str] = "tools[{}].function".format
    """Returns the path of a function, given by its index."""
    choice: str = "tool_choice"
    forced: str = '"required"'
    """The value of `choice` that forces a call."""
    alone: str = "parallel_tool_calls is false"
    """How a client asks for at most one call."""
    thinking: str = "thinking_budget"
    """The field that limits thinking."""
