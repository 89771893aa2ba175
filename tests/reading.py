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
    ),
    "llama3_json": (
        '{"name": "get_weather", "parameters": {"city": "San Francisco"}}',
        (
            '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters":'
            ' {"a": 2}}'
        ),
    ),
    "pythonic": (
        '[get_weather(city="San Francisco", days=3), add(a=-1)]',
        "<|python_start|>[get_weather(tags=['a', True, None, {\"b\": 1.5}])]<|python_end|>",
    ),
    "mistral": (
        (
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 3}}, {"name": "get_weather",'
            ' "arguments": {"city": "Oslo"}, "id": "VvvODy9mT"}]'
        ),
        'Sure.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]add{"a": 3}',
    ),
    "mistral_v11": (
        (
            '[TOOL_CALLS]get_weather[CALL_ID]D681PevKs[ARGS]{"city": "Paris"}[TOOL_CALLS]'
            'add[CALL_ID]9aFgK2dLx[ARGS]{"a": 3}'
        ),
    ),
    "mistral_v13": (
        ('Let me look.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]add[ARGS]{"a": 3}'),
    ),
    "deepseek_v3": (
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
            '```json\n{"city": "Tokyo"}\n```<｜tool▁call▁end｜>\n'
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
            '```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
        ),
    ),
    "deepseek_v31": (
        (
            "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
            '{"city": "Tokyo"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    ),
    "glm45": (
        (
            "I check.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Beijing"
            "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>5</arg_value>\n</tool_call>\n"
            "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
        ),
    ),
    "kimi_k2": (
        (
            "I'll check. <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
            '<|tool_call_argument_begin|>{"city": "Beijing"}<|tool_call_end|><|tool_call_begin|>'
            'functions.add:1 <|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
            "<|tool_calls_section_end|>"
        ),
    ),
    "minimax": (
        (
            '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Shanghai"}}\n'
            '{"name": "add", "arguments": {"a": 1}}\n</tool_calls>'
        ),
    ),
    "minimax_m2": (
        (
            'Let me.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">'
            'Sydney</parameter>\n<parameter name="tags">["now", "day"]</parameter>\n</invoke>\n'
            '<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n'
            "</minimax:tool_call>"
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
    ),
}
"""Outputs as in the families' templates, model cards and guides, with the functions above."""
