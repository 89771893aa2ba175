"""A chat's fields for tools: the functions that it offers, and which of them to call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from contract.errors import InvalidArgumentError, UnimplementedError
from router.http.requests.chat_words import ChatWords
from router.http.strict_json import Listed, Schema, excerpt
from router.parsers.choosing import OutputParsers
from router.text.chat_template import ChatTemplate

MAX_TOOLS = 128
"""Limit on the functions of one chat, as in OpenAI's API."""

_NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}

MAX_NAME_CHARS = 128
FunctionName = Annotated[str, Field(pattern=rf"^[A-Za-z0-9_-]{{1,{MAX_NAME_CHARS}}}$")]


class Function(Schema):
    """A function that the model may call."""

    name: FunctionName
    description: str = ""
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object; None: no parameters."""
    strict: bool = False
    """Whether a call's arguments must follow the schema."""

    def schema_of_arguments(self) -> Mapping[str, Any]:
        """Return the JSON schema of a call's arguments."""
        return self.parameters or _NO_PARAMETERS


class Tool(Schema):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Return the tool for a chat template; it has only the fields that the client set."""
        said = self.function.model_dump(exclude_unset=True, exclude={"strict"})
        return {"type": "function", "function": said}


class FunctionRef(Schema):
    """The name of a function."""

    name: FunctionName


class NamedChoice(Schema):
    """A `tool_choice` that names the function to call."""

    type: Literal["function"]
    function: FunctionRef


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a chat's template shows, and the calls that the model may make."""

    for_template: list[dict[str, Any]]
    offered: Sequence[Function]
    functions: Sequence[Function]
    """The functions that may be called."""
    is_forced: bool = False
    """Whether a function must be called."""
    is_alone: bool = False
    """Whether an output may have at most one call."""

    @property
    def wants_calls(self) -> bool:
        """Whether the model may call a function."""
        return bool(self.functions)


class ToolFields(Schema):
    """The fields of a chat's body that concern tools."""

    tools: Annotated[Listed[Tool], Field(default_factory=list, max_length=MAX_TOOLS)]
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    """None: "auto" if there are tools, else "none"."""
    parallel_tool_calls: bool = True
    """Whether an output may have several calls; if `tool_choice` names a function, each output has
    exactly one call."""

    def tool_use(
        self, template: ChatTemplate, parsers: OutputParsers, words: ChatWords
    ) -> ToolUse | None:
        """Return how the chat uses tools; None: not at all.

        Raises:
            InvalidArgumentError: `tool_choice` names a tool that is not offered.
            UnimplementedError: The model's template does not take tools; or the model may choose
                whether to call a tool, but no parser knows the syntax in which it writes calls.
        """
        if not self.tools:
            if isinstance(self.tool_choice, NamedChoice):
                self._named(self.tool_choice.function.name)
            if self.tool_choice == "required":
                raise InvalidArgumentError(words.choice, f"is {words.forced}; it needs tools")
            return None
        if self.tool_choice == "none" and not template.takes_tools:
            check_names(self.tools, words.path)
            return None
        shown = show_tools(self.tools, template, words.path)
        offered = [tool.function for tool in self.tools]
        is_alone = not self.parallel_tool_calls
        match self.tool_choice:
            case "none":
                return ToolUse(shown, offered, [])
            case "auto" | None:
                if parsers.tools is None:
                    raise UnimplementedError(
                        f'{words.choice} is "auto"; with this model it must be "none",'
                        f" {words.forced} or name a function: its template writes calls in an"
                        " unknown syntax (--tool-parser)"
                    )
                return ToolUse(shown, offered, offered, is_alone=is_alone)
            case "required":
                return ToolUse(shown, offered, offered, is_forced=True, is_alone=is_alone)
            case NamedChoice():
                named = self._named(self.tool_choice.function.name)
                return ToolUse(shown, offered, [named], is_forced=True, is_alone=True)

    def _named(self, name: str) -> Function:
        for tool in self.tools:
            if tool.function.name == name:
                return tool.function
        raise InvalidArgumentError(
            "tool_choice", f"names the function {excerpt(name)}; tools has no such function"
        )


def show_tools(
    tools: Sequence[Tool],
    template: ChatTemplate,
    tool_path: Callable[[int], str] = "tools[{}].function".format,
) -> list[dict[str, Any]]:
    """Return a chat's tools for its template.

    Raises:
        InvalidArgumentError: Two tools have the same name.
        UnimplementedError: The template does not take tools.
    """
    check_names(tools, tool_path)
    if not template.takes_tools:
        raise UnimplementedError(
            f"tools has {len(tools)} entries; it must be empty or absent: the model's chat template"
            " does not take tools"
        )
    return [tool.for_template() for tool in tools]


def check_names(tools: Sequence[Tool], tool_path: Callable[[int], str]) -> None:
    """Check that no two tools have the same name; may raise InvalidArgumentError."""
    names = [tool.function.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InvalidArgumentError(
                f"{tool_path(i)}.name", f"is {excerpt(name)}; another tool has this name"
            )
