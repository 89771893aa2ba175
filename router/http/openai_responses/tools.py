"""The tools of a response: functions, groups of functions, and hosted tools.

A hosted tool, such as a web search, runs on OpenAI's servers; Quire runs no tools. Agents offer
some hosted tools by default. A request with these tools is served, but Quire does not show these
tools to the model, and a header of the answer names them. This is allowed, since a model need not
use a tool that it is offered. A request is refused if it offers any other hosted tool, or if its
`tool_choice` names a hosted tool.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Field, InstanceOf, SerializeAsAny

from contract.errors import InvalidArgumentError
from router.http.answers.objects import Json
from router.http.openai_responses.variants import parse_variant
from router.http.requests.tools import (
    MAX_NAME_CHARS,
    MAX_TOOLS,
    FunctionName,
    ToolFields,
)
from router.http.strict_json import Listed, Schema, excerpt


class FunctionTool(Schema):
    """A function that the model may call."""

    unimplemented = MappingProxyType(
        {
            "defer_loading": (False,),
            "allowed_callers": (["direct"],),
            "output_schema": (),
            "async": (False,),
        }
    )

    type: Literal["function"]
    name: FunctionName
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool = False

    def shown(self) -> Json:
        """Return the JSON of this tool in a response, which repeats the client's tools."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description or None,
            "parameters": self.parameters,
            "strict": self.strict,
        }


class FunctionGroup(Schema):
    """A group of functions; the model sees each function as GROUP__FUNCTION."""

    type: Literal["namespace"]
    name: FunctionName
    description: str = ""
    tools: Annotated[Listed[FunctionTool], Field(max_length=MAX_TOOLS)]

    def shown(self) -> Json:
        """Return the JSON of this group in a response, which repeats the client's tools."""
        tools = [tool.shown() for tool in self.tools]
        return {**self.model_dump(include={"type", "name", "description"}), "tools": tools}


class LeftOutTool(Schema):
    """A hosted tool that Quire does not show to the model, whatever the tool's settings are."""

    model_config = ConfigDict(extra="ignore")

    type: str


class NamedFunction(Schema):
    """A `tool_choice` that names the function to call."""

    type: Literal["function"]
    name: FunctionName


AnyTool: TypeAlias = FunctionTool | FunctionGroup | LeftOutTool

_KINDS: dict[str, type[AnyTool]] = {
    "function": FunctionTool,
    "namespace": FunctionGroup,
    "web_search": LeftOutTool,
    "web_search_preview": LeftOutTool,
    "image_generation": LeftOutTool,
}


def parse_tools(value: object) -> list[AnyTool]:
    """Return the tools of a body's `tools`; raises QuireError that names the first invalid tool."""
    if not isinstance(value, list):
        raise InvalidArgumentError("tools", f"is {excerpt(value)}; it must be a list")
    if len(value) > MAX_TOOLS:
        raise InvalidArgumentError(
            "tools", f"has {len(value)} entries; it must have at most {MAX_TOOLS}"
        )
    return [parse_variant(tool, f"tools[{i}]", _KINDS) for i, tool in enumerate(value)]


def grouped_name(group: str, name: str) -> str:
    """Return the function's name as the model sees it; `group` may be empty."""
    return f"{group}__{name}" if group else name


class ResponseTools(Schema):
    """The fields for tools in the body of POST /v1/responses."""

    tools: Annotated[
        list[SerializeAsAny[InstanceOf[Schema]]],
        BeforeValidator(parse_tools),
        Field(default_factory=list),
    ]
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool = True

    def check_tools(self) -> None:
        """Check the names and the number of all functions, including those in groups.

        Raises InvalidArgumentError if the model would see two functions with the same name, or if a
        limit is exceeded.
        """
        names: set[str] = set()
        for path, group, function in self._functions():
            name, made = function.name, "is"
            if group is not None:
                name, made = grouped_name(group.name, function.name), "makes the name"
            if len(name) > MAX_NAME_CHARS:
                raise InvalidArgumentError(
                    f"{path}.name",
                    f"{made} {excerpt(name)}; it must have at most {MAX_NAME_CHARS} characters",
                )
            if name in names:
                raise InvalidArgumentError(
                    f"{path}.name", f"{made} {excerpt(name)}; another tool has this name"
                )
            names.add(name)
        if len(names) > MAX_TOOLS:
            raise InvalidArgumentError(
                "tools", f"has {len(names)} functions; it must have at most {MAX_TOOLS}"
            )

    @property
    def left_out(self) -> Sequence[str]:
        """The types of the hosted tools that are left out."""
        return [tool.type for tool in self.tools if isinstance(tool, LeftOutTool)]

    @property
    def name_to_group(self) -> Mapping[str, tuple[str, str]]:
        """Maps a name that the model sees, such as "git__log", to its group and function."""
        return {
            grouped_name(group.name, tool.name): (group.name, tool.name)
            for _, group, tool in self._functions()
            if group is not None
        }

    @property
    def function_paths(self) -> Sequence[str]:
        """For each function of `tool_fields`, its path in the client's JSON."""
        return [path for path, _, _ in self._functions()]

    def tool_fields(self) -> ToolFields:
        """Return the tools of the chat."""
        functions = []
        for _, group, tool in self._functions():
            function = tool.model_dump(exclude={"type"}, exclude_unset=True)
            if group is not None:
                function["name"] = grouped_name(group.name, tool.name)
                said = [text for text in (group.description, tool.description) if text]
                function |= {"description": "\n\n".join(said)} if said else {}
            functions.append({"type": "function", "function": function})
        choice: Any = self.tool_choice
        if isinstance(choice, NamedFunction):
            choice = {"type": "function", "function": {"name": choice.name}}
        return ToolFields.model_validate(
            {
                "tools": functions,
                "tool_choice": choice,
                "parallel_tool_calls": self.parallel_tool_calls,
            }
        )

    def shown_tools(self) -> Json:
        """Return a response's fields for tools: those of the request, without left-out tools."""
        choice: Any = self.tool_choice
        if isinstance(choice, NamedFunction):
            choice = choice.model_dump()
        return {
            "tool_choice": choice or "auto",
            "tools": [
                tool.shown()
                for tool in self.tools
                if isinstance(tool, FunctionTool | FunctionGroup)
            ],
            "parallel_tool_calls": self.parallel_tool_calls,
        }

    def _functions(self) -> Iterator[tuple[str, FunctionGroup | None, FunctionTool]]:
        """Yield each function's path in the client's JSON, its group, and the function."""
        for i, tool in enumerate(self.tools):
            if isinstance(tool, FunctionTool):
                yield f"tools[{i}]", None, tool
            elif isinstance(tool, FunctionGroup):
                for j, function in enumerate(tool.tools):
                    yield f"tools[{i}].tools[{j}]", tool, function
