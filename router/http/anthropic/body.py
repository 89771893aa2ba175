"""The bodies of /v1/messages and /v1/messages/count_tokens, and their conversion to a chat."""

from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field

from contract.errors import UnimplementedError
from contract.request import GenerateRequest
from contract.sampling import SamplingParams, StructuredOutput
from router.http.anthropic.blocks import (
    CacheControl,
    CacheMarked,
    Messages,
    System,
    cache_marks,
    chat_messages,
    ends_with_assistant,
)
from router.http.requests import tools as chat_tools
from router.http.requests.chat import ThinkingBudget
from router.http.requests.chat_words import ChatWords
from router.http.requests.conversation import Conversation, Effort, thinking_switch
from router.http.requests.messages import for_template
from router.http.strict_json import Listed, Schema
from router.parsers.choosing import OutputParsers
from router.text.chat_template import ChatTemplate

FIELD_TO_JSON: Final = MappingProxyType(
    {
        "prompt": "messages",
        "stop": "stop_sequences",
        "structured": "output_config",
        "structured.json_schema": "output_config.format.schema",
    }
)
"""Maps a chat's fields to their names in this API."""

_WORDS: Final = ChatWords(
    path="tools[{}]".format,
    choice="tool_choice.type",
    forced='"any"',
    alone="tool_choice.disable_parallel_tool_use is true",
    forms=FIELD_TO_JSON,
    thinking="thinking.budget_tokens",
)


class Tool(CacheMarked):
    """A function that the model may call; Anthropic's own tools are not supported."""

    unimplemented = MappingProxyType(
        {
            "allowed_callers": (["direct"],),
            "defer_loading": (False,),
            "eager_input_streaming": (False, True),  # arguments are always streamed
            "input_examples": ([],),
        }
    )

    type: Literal["custom"] = "custom"
    name: chat_tools.FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False

    def for_chat(self) -> chat_tools.Tool:
        said: dict[str, Any] = {"parameters": self.input_schema, "strict": self.strict}
        if self.description is not None:
            said["description"] = self.description
        function = chat_tools.Function.model_construct(None, name=self.name, **said)
        return chat_tools.Tool.model_construct(type="function", function=function)


class AnyChoice(Schema):
    """A choice that lets the model call a tool ("auto"), or makes it call one ("any")."""

    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool = False


class NamedChoice(Schema):
    """A choice that names the tool to call."""

    type: Literal["tool"]
    name: chat_tools.FunctionName
    disable_parallel_tool_use: bool = False


class NoChoice(Schema):
    """A choice that forbids calls."""

    type: Literal["none"]


class ThinkingWithBudget(Schema):
    """Thinking with a limit on its tokens."""

    type: Literal["enabled"]
    budget_tokens: ThinkingBudget
    display: Literal["summarized", "omitted"] = "summarized"


class ThinkingByModel(Schema):
    """Thinking whose length the model decides."""

    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] = "summarized"


class NoThinking(Schema):
    """No thinking."""

    type: Literal["disabled"]


Choice: TypeAlias = Annotated[AnyChoice | NamedChoice | NoChoice, Field(discriminator="type")]
Thinking: TypeAlias = Annotated[
    ThinkingWithBudget | ThinkingByModel | NoThinking, Field(discriminator="type")
]


class OutputFormat(Schema):
    """The form that the text of an output must have."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]

    def form(self) -> StructuredOutput:
        return StructuredOutput(json_schema=self.schema_)


class OutputConfig(Schema):
    """How much effort to spend on an output, and the output's form."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """How much to think. The value has an effect only if the model's chat template uses it."""
    format: OutputFormat | None = None


class Metadata(Schema):
    """Labels of a call, which have no effect."""

    user_id: str = ""


class CountBody(CacheMarked):
    """POST /v1/messages/count_tokens: the fields that determine a prompt."""

    unimplemented = MappingProxyType(
        {
            "context_management": (
                {"edits": []},
                {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            ),
            "mcp_servers": ([],),
            "speed": ("standard",),
        }
    )

    model: str = ""
    messages: Messages
    system: System
    tools: Annotated[Listed[Tool], Field(default_factory=list, max_length=chat_tools.MAX_TOOLS)]
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @property
    def shows_thinking(self) -> bool:
        return getattr(self.thinking, "display", "") != "omitted"

    def conversation(self, template: ChatTemplate, parsers: OutputParsers) -> Conversation:
        """Convert the body to a chat.

        Raises:
            InvalidArgumentError: A message is empty, or has a content block that it must not have.
            UnimplementedError: The model does not support the requested thinking.
        """
        messages = chat_messages(self.system, self.messages)
        is_continued = ends_with_assistant(self.messages)
        config = self.output_config or OutputConfig.model_construct()
        effort: Effort | None = None
        if config.effort is not None and "reasoning_effort" in template.variables:
            effort = "xhigh" if config.effort == "max" else config.effort
        budget, switched = self._thinking(template, parsers)
        continued = {"add_generation_prompt": False, "continue_final_message": True}
        return Conversation(
            model=self.model,
            messages=for_template(messages),
            tools=self._tools(),
            form=None if config.format is None else config.format.form(),
            thinking_budget=budget,
            effort=effort,
            words=replace(_WORDS, thinking="thinking.type") if budget == 0 else _WORDS,
            continued=messages[-1].text if is_continued else "",
            template_kwargs=switched | (continued if is_continued else {}),
        )

    def _tools(self) -> chat_tools.ToolFields:
        choice, is_alone = self._choice()
        return chat_tools.ToolFields.model_construct(
            tools=[tool.for_chat() for tool in self.tools],
            tool_choice=choice,
            parallel_tool_calls=not is_alone,
        )

    def _choice(self) -> tuple[str | chat_tools.NamedChoice | None, bool]:
        """Return a chat's `tool_choice`, and whether at most one tool call is allowed."""
        match self.tool_choice:
            case AnyChoice(type=kind, disable_parallel_tool_use=is_alone):
                return "required" if kind == "any" else kind, is_alone
            case NamedChoice(name=name):
                function = chat_tools.FunctionRef.model_construct(name=name)
                named = chat_tools.NamedChoice.model_construct(type="function", function=function)
                return named, True
            case NoChoice():
                return "none", False
        return None, False

    def _thinking(
        self, template: ChatTemplate, parsers: OutputParsers
    ) -> tuple[int | None, dict[str, Any]]:
        """Return the budget for thinking, and template variables that turn thinking on or off."""
        switch = thinking_switch(template)
        match self.thinking:
            case ThinkingWithBudget(budget_tokens=budget):
                if parsers.thinking_family is None and not parsers.reads_messages:
                    raise UnimplementedError(
                        'thinking.type is "enabled"; with this model it must be "adaptive" or'
                        " absent: no parser for its thinking is known (--reasoning-parser)"
                    )
                return budget, {} if switch is None else {switch: True}
            case NoThinking() if switch is not None:
                return None, {switch: False}
            case NoThinking() if parsers.thinking_family is not None or parsers.reads_messages:
                return 0, {}
        return None, {}

    def _marks(self) -> Iterator[CacheControl]:
        marked = (self, *self.system, *self.tools, *cache_marks(self.messages))
        return (mark for part in marked if (mark := part.cache_control) is not None)

    @property
    def cache_pin_s(self) -> float | None:
        """How long to pin the prompt in the prefix cache; None: do not pin it.

        This is the longest `ttl` of the `cache_control` fields in the body.
        """
        return max((mark.ttl_s for mark in self._marks()), default=None)


class MessagesBody(CountBody):
    """POST /v1/messages."""

    unimplemented = MappingProxyType(
        {
            **CountBody.unimplemented,
            "container": (),
            "inference_geo": (),
            "service_tier": ("auto", "standard_only"),
        }
    )

    max_tokens: Annotated[int, Field(ge=1)]
    metadata: Metadata | None = None
    stop_sequences: Annotated[Listed[str], Field(default_factory=list)]
    stream: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def request(self, prompt: str, request_id: str, *, max_model_len: int) -> GenerateRequest:
        """Return the request for a prompt, before `OutputPlan.applied_to` changes the request."""
        return GenerateRequest(
            prompt=prompt,
            model=self.model,
            request_id=request_id,
            sampling=SamplingParams(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                max_tokens=min(self.max_tokens, max_model_len),
            ),
            stop=tuple(self.stop_sequences),
            add_special_tokens=False,  # the template has written the special tokens
            cache_pin_s=self.cache_pin_s,
            cuts_max_tokens=True,
        )
