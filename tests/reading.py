"""Published examples of models' outputs, and the readers of tests."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.parsers.choosing import OutputParsers
from router.parsers.families import THINKING_FAMILIES, TOOL_FAMILIES
from router.parsers.pieces import CallPiece, Reader, Text

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "tags": {"type": "array"},
            "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        }
    },
    "add": {"properties": {"a": {"type": "integer"}}},
}
"""The functions that every example may call."""


@dataclass
class Read:
    """The parts that a reader found in an output."""

    events: list[list[str]] = field(default_factory=list)
    """Neighbours of a kind joined: ["text", …], ["thought", …], ["call", name, arguments]."""
    ids: list[str] = field(default_factory=list)

    @property
    def calls(self) -> list[tuple[str, Any]]:
        return [(e[1], json.loads(e[2])) for e in self.events if e[0] == "call"]

    @property
    def text(self) -> str:
        return "".join(event[1] for event in self.events if event[0] == "text")

    @property
    def thought(self) -> str:
        return "".join(event[1] for event in self.events if event[0] == "thought")


def new_reader(
    family: str,
    thinking: str = "",
    *,
    has_begun: bool = False,
    tools: Mapping[str, Mapping[str, Any]] = TOOLS,
) -> Reader:
    parsers = OutputParsers(
        TOOL_FAMILIES[family],
        THINKING_FAMILIES[thinking] if thinking else None,
        token_id=lambda _: None,
        is_special=lambda _: False,
    )
    return parsers.new_reader(tools, has_begun=has_begun)


def read(reader: Reader, pieces: Iterable[str]) -> Read:
    """Read an output that comes in pieces; check that calls are numbered, and begin once."""
    result = Read()
    events = result.events
    for piece in (piece for read in [*map(reader.push, pieces), reader.flush()] for piece in read):
        if not isinstance(piece, CallPiece):
            kind = "text" if isinstance(piece, Text) else "thought"
            if events and events[-1][0] == kind:
                events[-1][1] += piece.text
            else:
                events.append([kind, piece.text])
        elif piece.call_id is not None:
            assert piece.position == len(result.ids)
            result.ids.append(piece.call_id)
            events.append(["call", piece.name or "", piece.arguments])
        else:
            assert events[-1][0] == "call", "arguments belong to the last call"
            assert piece.position == len(result.ids) - 1
            events[-1][2] += piece.arguments
    return result


EXAMPLES: dict[str, Sequence[str]] = {
    "hermes": (
        (
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n'
            "</tool_call>"
        ),
        (
            'Let me see.\n<tool_call>\n{"arguments": {"a": 1}, "name": "add"}\n</tool_call>\n'
            '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>\n'
        ),
        (
            "<tool_call>\n"
            '{"name": "get_weather", "arguments": {"city": "K\\u00f6ln", "tags": [], "unit":'
            " null}}\n</tool_call>"
        ),
        (
            'Both.<tool_call>{"name":"add","arguments":{"a":1}}</tool_call><tool_call>{"name":'
            '"get_weather","arguments":{"city":"a \\"</tool_call>\\" b"}}</tool_call>'
        ),
    ),
    "qwen3_coder": (
        (
            "I'll look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nNew York\n"
            "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
        ),
        (
            '<tool_call>\n<function=get_weather>\n<parameter=tags>\n["a", {"b": 1}]\n</parameter>\n'
            "</function>\n</tool_call>\n<tool_call>\n<function=add>\n</function>\n</tool_call>"
        ),
        (
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nif a < b:\n    c = '</p>'\n\n"
            "</parameter>\n<parameter=unit>\nnull\n</parameter>\n</function>\n</tool_call>"
        ),
        (  # models forget the marker of the section
            "Now.\n<function=add>\n<parameter=a>\n-7\n</parameter>\n</function>"
        ),
    ),
    "llama3_json": (
        '{"name": "get_weather", "parameters": {"city": "San Francisco"}}',
        (
            '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters":'
            ' {"a": 2}}'
        ),
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris", "days": 1}}',
        '<|python_tag|>{"name": "add", "parameters": {"a": 2}}',
    ),
    "pythonic": (
        '[get_weather(city="San Francisco", days=3), add(a=-1)]',
        "<|python_start|>[get_weather(tags=['a', True, None, {\"b\": 1.5}])]<|python_end|>",
        "[get_weather(city='San Francisco'), get_weather(city='Seattle', unit=None)]",
        "[\n    add(a=1),\n    get_weather(city='Saint-Denis', tags=[\"l\\'île\", -0.5e3])\n]",
    ),
    "mistral": (
        (
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 3}}, {"name": "get_weather",'
            ' "arguments": {"city": "Oslo"}, "id": "VvvODy9mT"}]'
        ),
        'Sure.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]add{"a": 3}',
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]',
        '[TOOL_CALLS][{"arguments": {"a": 1}, "name": "add"}]',
    ),
    "mistral_v11": (
        (
            '[TOOL_CALLS]get_weather[CALL_ID]D681PevKs[ARGS]{"city": "Paris"}[TOOL_CALLS]'
            'add[CALL_ID]9aFgK2dLx[ARGS]{"a": 3}'
        ),
        'I add.[TOOL_CALLS]add[CALL_ID]bV4Zq0Rt1[ARGS]{"a": [1, {"b": "]"}]}',
    ),
    "mistral_v13": (
        ('Let me look.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]add[ARGS]{"a": 3}'),
        '[TOOL_CALLS]get_weather[ARGS]{"city": "a\\nb", "tags": []}',
    ),
    "deepseek_v3": (
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
            '```json\n{"city": "Tokyo"}\n```<｜tool▁call▁end｜>\n'
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
            '```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
        ),
        (
            "I look.\n\n<｜tool▁calls▁begin｜>"
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
            '```json\n{"city": "Hangzhou", "tags": ["```"]}\n```<｜tool▁call▁end｜>'
            "<｜tool▁calls▁end｜>"
        ),
    ),
    "deepseek_v31": (
        (
            "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
            '{"city": "Tokyo"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
            '{"city": "Hangzhou", "unit": null}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
        ),
    ),
    "glm45": (
        (
            "I check.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Beijing"
            "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>5</arg_value>\n</tool_call>\n"
            "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
        ),
        (
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>a < b\n c</arg_value>\n"
            "<arg_key>tags</arg_key>\n<arg_value>[1, true]</arg_value>\n<arg_key>unit</arg_key>\n"
            "<arg_value>celsius</arg_value>\n</tool_call>"
        ),
    ),
    "kimi_k2": (
        (
            "I'll check. <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
            '<|tool_call_argument_begin|>{"city": "Beijing"}<|tool_call_end|><|tool_call_begin|>'
            'functions.add:1 <|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
            "<|tool_calls_section_end|>"
        ),
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
            '<|tool_call_argument_begin|>{"city": "Beijing", "tags": ["<|tool"]}<|tool_call_end|>'
            "<|tool_calls_section_end|>"
        ),
    ),
    "minimax": (
        (
            '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Shanghai"}}\n'
            '{"name": "add", "arguments": {"a": 1}}\n</tool_calls>'
        ),
        (
            'I need it.\n\n<tool_calls>\n{"name": "get_weather", "arguments": {"city": "San'
            ' Francisco", "days": 3, "tags": ["a"]}}\n</tool_calls>'
        ),
    ),
    "minimax_m2": (
        (
            'Let me.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">'
            'Sydney</parameter>\n<parameter name="tags">["now", "day"]</parameter>\n</invoke>\n'
            '<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n'
            "</minimax:tool_call>"
        ),
        (
            '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">a "<b>"\nc'
            '</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>'
        ),
    ),
    "harmony": (
        (
            "<|channel|>analysis<|message|>I need the weather.<|end|><|start|>assistant"
            "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
            '{"city":"San Francisco"}<|call|>'
        ),
        (
            "<|start|>assistant to=functions.add<|channel|>commentary json<|message|>"
            '{"a": 1}<|call|>'
        ),
        (
            "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>"
            "It is 20 °C.<|return|>"
        ),
        (  # a preamble before the call
            "<|channel|>analysis<|message|>Both.<|end|><|start|>assistant<|channel|>commentary"
            "<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
            '<|constrain|>json<|message|>{"a": {"b": ["<|end"]}}<|call|>'
        ),
    ),
}
"""Outputs as in the families' templates, model cards and guides, with the functions above."""
