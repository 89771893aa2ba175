"""A chat's fields for functions: which it offers, and which the model must call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from contract.errors import InvalidArgumentError, UnimplementedError
from contract.request import GenerateRequest
from contract.sampling import StructuredOutput
from router.http.responses.tool_calls import CallReader, ChosenCall, ForcedCall, TaggedCalls
from router.http.strict_json import Listed, Schema, excerpt
from router.text.chat_template import ChatTemplate

MAX_TOOLS = 128
"""Most functions of one chat, as OpenAI has it."""

_NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class Function(Schema):
    """A function that the model may call."""

    name: FunctionName
    description: str = ""
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object; None: there are none."""
    strict: bool = False
    """Whether a call's arguments must follow it."""

    def schema_of_arguments(self) -> Mapping[str, Any]:
        """Return the JSON schema of a forced call's arguments."""
        return self.parameters or _NO_PARAMETERS


class Tool(Schema):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Return what a chat template gets: only what the client set."""
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
    """The effect of a chat's tools on its prompt, its outputs' form and its answers."""

    for_template: list[dict[str, Any]]
    structured: StructuredOutput | None = None
    """The form that makes an output a call."""
    new_reader: Callable[[], CallReader] | None = None
    """Makes the reader of calls in one output's text; None: there are no calls."""
    stop: tuple[str, ...] = ()
    """Added to the client's stop strings."""

    @property
    def field_to_json(self) -> Mapping[str, str]:
        """The JSON name of the field that a forced call sets."""
        return {} if self.structured is None else {"structured.json_schema": "tools"}

    def applied_to(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with the form and stop strings that `new_reader` needs."""
        if self.structured is not None:
            sampling = replace(request.sampling, structured=self.structured)
            request = replace(request, sampling=sampling)
        return replace(request, stop=request.stop + self.stop)


class ToolFields(Schema):
    """The part of a chat's body for tools."""

    tools: Annotated[Listed[Tool], Field(default_factory=list, max_length=MAX_TOOLS)]
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    """None: "auto" with tools, "none" without."""
    parallel_tool_calls: bool = True
    """Whether an output may have several calls; a forced call is always alone."""

    def tool_use(self, template: Callable[[], ChatTemplate]) -> ToolUse | None:
        """Return the tools' effect; None without tools.

        Raises:
            InvalidArgumentError: `tool_choice` names a tool that is not offered.
            UnimplementedError: The model's template does not take tools, or writes calls in an
                unknown way, or `strict` is set for a call that is not forced.
        """
        if not self.tools:
            if self.tool_choice not in (None, "none", "auto"):
                raise InvalidArgumentError(
                    "tool_choice", f"is {excerpt(self._choice_json)}; it needs tools"
                )
            return None
        shown = show_tools(self.tools, template())
        match self.tool_choice:
            case "none":
                return ToolUse(shown)
            case "auto" | None:
                self._check_auto(template())
                return ToolUse(
                    shown,
                    new_reader=TaggedCalls,
                    stop=() if self.parallel_tool_calls else (TaggedCalls.END,),
                )
            case "required":
                return _forced(shown, [tool.function for tool in self.tools])
            case NamedChoice():
                return _forced(shown, [self._named(self.tool_choice.function.name)])

    def _check_auto(self, template: ChatTemplate) -> None:
        if not template.tags_tool_calls:
            raise UnimplementedError(
                'tool_choice is "auto"; with this model it must be "none", "required" or name a'
                " function: its template does not write calls as <tool_call>{json}</tool_call>,"
                " and no other notation is supported"
            )
        for i, tool in enumerate(self.tools):
            if tool.function.strict:
                raise UnimplementedError(
                    f"tools[{i}].function.strict is true; it is supported only if tool_choice is"
                    ' "required" or names a function'
                )

    def _named(self, name: str) -> Function:
        for tool in self.tools:
            if tool.function.name == name:
                return tool.function
        raise InvalidArgumentError(
            "tool_choice", f"names the function {excerpt(name)}; tools has none of that name"
        )

    @property
    def _choice_json(self) -> object:
        choice = self.tool_choice
        return choice.model_dump() if isinstance(choice, NamedChoice) else choice


def show_tools(tools: Sequence[Tool], template: ChatTemplate) -> list[dict[str, Any]]:
    """Return what a template gets of a chat's tools.

    Raises:
        InvalidArgumentError: Two have the same name.
        UnimplementedError: The template does not take tools.
    """
    names = [tool.function.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InvalidArgumentError(
                f"tools[{i}].function.name", f"is {excerpt(name)}, like that of another"
            )
    if not template.takes_tools:
        raise UnimplementedError(
            f"tools has {len(tools)} entries; it must be empty or absent: the model's chat template"
            " does not take tools"
        )
    return [tool.for_template() for tool in tools]


def _forced(shown: list[dict[str, Any]], functions: list[Function]) -> ToolUse:
    """Force one call of one of the functions, by the output's form."""
    if len(functions) == 1:
        (function,) = functions
        schema = function.schema_of_arguments()
        return ToolUse(shown, _json_schema(schema), lambda: ForcedCall(function.name))
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function.name},
                "arguments": function.schema_of_arguments(),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    return ToolUse(shown, _json_schema({"anyOf": calls}), ChosenCall)


def _json_schema(schema: Mapping[str, Any]) -> StructuredOutput:
    return StructuredOutput(json_schema=schema)
