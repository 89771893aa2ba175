"""What errors call the parts of a chat, because each API's JSON has its own names for them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChatWords:
    """The names that one API's JSON has for the fields and values of a chat."""

    forms: Mapping[str, str]
    """Maps the kind of an output's form, such as "structured.regex", to the field that sets it."""
    path: Callable[[int], str] = "tools[{}].function".format
    """Returns the path, in the client's JSON, of the function with this index."""
    choice: str = "tool_choice"
    forced: str = '"required"'
    """The value of `choice` that forces a call."""
    alone: str = "parallel_tool_calls is false"
    """How a client asks for at most one call."""
    thinking: str = "thinking_budget"
    """The field that limits thinking."""
