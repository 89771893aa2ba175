"""The known model families, with the syntax of thinking and tool calls in each family."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from router.parsers.harmony import HarmonySyntax
from router.parsers.thinking import Thinking
from router.parsers.tool_calls import (
    MistralBody,
    NamedBody,
    ObjectBody,
    PythonicBody,
    Syntax,
    TaggedBody,
)


@dataclass(frozen=True, slots=True)
class Written:
    """The syntax in which a family's models write calls, for the grammars of `call_grammar.py`.

    In the fields of this class, NAME, ARGUMENTS, KEY, VALUE, INDEX (the call's number) and CALLID
    are placeholders.
    """

    call: str
    first: str = ""
    """The text before the first call."""
    between: str = ""
    last: str = ""
    parameter: str = ""
    """The syntax of one parameter of ARGUMENTS; empty: ARGUMENTS is a JSON object."""
    between_parameters: str = ""
    is_python: bool = False
    """Whether VALUE is a Python literal. If not, VALUE is JSON, but a string has no quotes."""
    is_alone: bool = False
    """Whether an output ends after its first call."""
    like_call: str = ""
    """A regex for the beginning of a call without a marker; NAMES stands for the function names
    joined by |. Empty: calls have markers."""
    marker: str = ""
    """If `like_call` is set: an optional marker before a call."""


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """A family of models: the syntax of its calls, and texts that identify its chat templates."""

    syntax: Syntax | HarmonySyntax
    marks: tuple[str, ...]
    """A chat template that contains all of these texts, but not `without`, belongs to this family,
    unless it belongs to an earlier family of `TOOL_FAMILIES`."""
    without: str = ""
    """A text that no chat template of this family contains; empty: there is no such text."""
    written: Written | None = None
    """None: forced calls are plain JSON."""
    stop: str = ""
    """The stop string for outputs that may have only one call; empty: no stop string."""

    @property
    def is_harmony(self) -> bool:
        """Whether outputs, including thinking, consist of messages in harmony, gpt-oss's format."""
        return isinstance(self.syntax, HarmonySyntax)


_DEEPSEEK_SECTION: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL: Final = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_KIMI_SECTION: Final = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_ARGUMENTS: Final = '{"name": "NAME", "arguments": ARGUMENTS}'
_MISTRAL: Final = Syntax(
    MistralBody(ObjectBody(), NamedBody(("[ARGS]", ""), id_marker="[CALL_ID]")),
    call=("[TOOL_CALLS]", ""),
    has_short_ids=True,
)

TOOL_FAMILIES: Final[Mapping[str, ToolFamily]] = MappingProxyType(
    {
        "harmony": ToolFamily(
            HarmonySyntax(),
            ("<|channel|>", "<|message|>"),
            written=Written(
                "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS",
                is_alone=True,
            ),
            stop="<|call|>",
        ),
        "kimi_k2": ToolFamily(
            Syntax(
                NamedBody(("<|tool_call_argument_begin|>",), has_ids=True),
                call=("<|tool_call_begin|>", "<|tool_call_end|>"),
                section=_KIMI_SECTION,
            ),
            (_KIMI_SECTION[0],),
            written=Written(
                "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>ARGUMENTS"
                "<|tool_call_end|>",
                first=_KIMI_SECTION[0],
                last=_KIMI_SECTION[1],
            ),
            stop="<|tool_call_end|>",
        ),
        "deepseek_v3": ToolFamily(
            Syntax(
                NamedBody(("```json",), prefix="function<｜tool▁sep｜>", fence=("", "```")),
                call=_DEEPSEEK_CALL,
                section=_DEEPSEEK_SECTION,
            ),
            (_DEEPSEEK_SECTION[0], "```json"),
            written=Written(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```"
                "<｜tool▁call▁end｜>",
                first=_DEEPSEEK_SECTION[0],
                between="\n",
                last=_DEEPSEEK_SECTION[1],
            ),
            stop=_DEEPSEEK_CALL[1],
        ),
        "deepseek_v31": ToolFamily(
            Syntax(NamedBody(("<｜tool▁sep｜>",)), call=_DEEPSEEK_CALL, section=_DEEPSEEK_SECTION),
            (_DEEPSEEK_SECTION[0],),
            written=Written(
                "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
                first=_DEEPSEEK_SECTION[0],
                last=_DEEPSEEK_SECTION[1],
            ),
            stop=_DEEPSEEK_CALL[1],
        ),
        "glm45": ToolFamily(
            Syntax(
                TaggedBody("", ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")),
                call=("<tool_call>", "</tool_call>"),
            ),
            ("<arg_key>",),
            written=Written(
                "<tool_call>NAME\nARGUMENTS</tool_call>",
                between="\n",
                parameter="<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
            ),
            stop="</tool_call>",
        ),
        "minimax_m2": ToolFamily(
            Syntax(
                TaggedBody('">', ('<parameter name="', '">'), ("", "</parameter>")),
                call=('<invoke name="', "</invoke>"),
                section=("<minimax:tool_call>", "</minimax:tool_call>"),
            ),
            ("<minimax:tool_call>",),
            written=Written(
                '<invoke name="NAME">\nARGUMENTS</invoke>\n',
                first="<minimax:tool_call>\n",
                last="</minimax:tool_call>",
                parameter='<parameter name="KEY">VALUE</parameter>\n',
            ),
            stop="</invoke>",
        ),
        "minimax": ToolFamily(
            Syntax(ObjectBody(), section=("<tool_calls>", "</tool_calls>")),
            ("<tool_calls>",),
            written=Written(_ARGUMENTS + "\n", first="<tool_calls>\n", last="</tool_calls>"),
        ),
        "qwen3_coder": ToolFamily(
            Syntax(
                TaggedBody(">", ("<parameter=", ">"), ("", "</parameter>"), trims_line_ends=True),
                call=("<function=", "</function>"),
                section=("<tool_call>", "</tool_call>"),
                is_section_optional=True,
            ),
            ("<function=", "<parameter="),
            written=Written(
                "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
                between="\n",
                parameter="<parameter=KEY>\nVALUE\n</parameter>\n",
            ),
            stop="</tool_call>",
        ),
        "mistral_v11": ToolFamily(
            _MISTRAL,
            ("[TOOL_CALLS]", "[CALL_ID]"),
            written=Written("[TOOL_CALLS]NAME[CALL_ID]CALLID[ARGS]ARGUMENTS"),
        ),
        "mistral_v13": ToolFamily(
            _MISTRAL,
            ("[TOOL_CALLS]", "[ARGS]"),
            written=Written("[TOOL_CALLS]NAME[ARGS]ARGUMENTS"),
        ),
        "mistral": ToolFamily(
            _MISTRAL,
            ("[TOOL_CALLS]",),
            written=Written(_ARGUMENTS, first="[TOOL_CALLS][", between=", ", last="]"),
        ),
        "hermes": ToolFamily(
            Syntax(ObjectBody(), call=("<tool_call>", "</tool_call>")),
            ("<tool_call>",),
            without="<function=",
            written=Written(f"<tool_call>\n{_ARGUMENTS}\n</tool_call>", between="\n"),
            stop="</tool_call>",
        ),
        "pythonic": ToolFamily(
            Syntax(
                PythonicBody(),
                call=("<|python_start|>", "<|python_end|>"),
                at_start=True,
            ),
            ("[func_name1(",),
            written=Written(
                "NAME(ARGUMENTS)",
                first="[",
                between=", ",
                last="]",
                parameter="KEY=VALUE",
                between_parameters=", ",
                is_python=True,
                like_call=r"\s*\[\s*(NAMES)\(",
                marker="<|python_start|>",
            ),
        ),
        "llama3_json": ToolFamily(
            Syntax(ObjectBody(), call=("<|python_tag|>", ""), separator=";", at_start=True),
            ('{"name": function name, "parameters":',),
            written=Written(
                '{"name": "NAME", "parameters": ARGUMENTS}',
                between="; ",
                like_call=r'\s*\{\s*"(name|arguments|parameters|id|type)"',
                marker="<|python_tag|>",
            ),
        ),
    }
)
"""`ToolFamily.marks` says to which of these families a chat template belongs."""

THINKING_FAMILIES: Final[Mapping[str, Thinking]] = MappingProxyType(
    {
        "kimi_vl": Thinking("◁think▷", "◁/think▷"),
        "kimi_k2": Thinking("<think>", "</think>", (_KIMI_SECTION[0],)),
        "mistral": Thinking("[THINK]", "[/THINK]"),
        "seed": Thinking("<seed:think>", "</seed:think>"),
        "think": Thinking("<think>", "</think>"),
    }
)
"""A chat template belongs to the first of these families whose markers `end` and `other_ends` the
template contains. Harmony, gpt-oss's format, is not among these families, because its entry in
`TOOL_FAMILIES` reads both thinking and calls."""
