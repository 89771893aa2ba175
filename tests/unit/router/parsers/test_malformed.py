"""Text that is no call, or turns out to be none: readers return it as text, and stop parsing."""

import json

import pytest

from router.parsers.pieces import CallPiece
from tests.reading import new_reader, read

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
ADD = ["call", "add", '{"a":1,"b":"é"}']


def text(value):
    return ["text", value]


@pytest.mark.parametrize(
    ("family", "output", "events"),
    [
        ("hermes", "", []),
        ("hermes", "Hi there.\n", [text("Hi there.\n")]),
        ("hermes", "1 < 2, <tool>, <tool_cal", [text("1 < 2, <tool>, <tool_cal")]),
        ("hermes", f"\n\n{CALL}\n{CALL}\n", [ADD, ADD]),
        ("hermes", f"{CALL}\nDone.", [ADD, text("\nDone.")]),
        ("hermes", CALL.removesuffix("</tool_call>"), [ADD]),
        ("hermes", CALL.removesuffix("call>"), [ADD]),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', [["call", "now", "{}"]]),
        ("hermes", "<tool_call>{add}</tool_call>!", [text("<tool_call>{add}</tool_call>!")]),
        ("hermes", '<tool_call>["add"]</tool_call>', [text('<tool_call>["add"]</tool_call>')]),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": "1"}',
            [text('<tool_call>{"name": "add", "arguments": "1"}')],
        ),
        (
            "hermes",
            r'<tool_call>{"name": "\ud800"}</tool_call>',
            [text(r'<tool_call>{"name": "\ud800"}</tool_call>')],
        ),
        (
            "hermes",
            '<tool_call>{"name": 3}</tool_call>' + CALL,
            [text('<tool_call>{"name": 3}</tool_call>'), ADD],
        ),
        (  # a call that breaks after its arguments were shown
            "hermes",
            '<tool_call>{"name": "add", "arguments": {"a": oops}}</tool_call>',
            [["call", "add", '{"a":'], text("oops}}</tool_call>")],
        ),
        (  # models forget the last brace
            "hermes",
            '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>',
            [["call", "add", '{"a":1}']],
        ),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": {"a": "x\ny\tz"}}</tool_call>',
            [["call", "add", '{"a":"x\\ny\\tz"}']],
        ),
        (  # cut short
            "hermes",
            '<tool_call>{"name": "add", "arguments": {"a": "x\\',
            [["call", "add", '{"a":"x\\']],
        ),
        ("qwen3_coder", "<tool_call>\n<function=", [text("<tool_call>\n<function=")]),
        ("qwen3_coder", "<tool_call>\nadd", [text("<tool_call>\nadd")]),
        (
            "qwen3_coder",
            "<function=add>\n<parameter=a>\n1\n</parameter>\njunk</function>",
            [["call", "add", '{"a":1}'], text("junk</function>")],
        ),
        (
            "qwen3_coder",
            "<function=add>\n<parameter=a>\n12",
            [["call", "add", '{"a":12']],
        ),
        (
            "qwen3_coder",
            "<function=get_weather>\n<parameter=city>\nPar",
            [["call", "get_weather", '{"city":"Par']],
        ),
        (  # what was cut short is the beginning of valid JSON
            "qwen3_coder",
            "<function=add>\n<parameter=a>\none",
            [["call", "add", '{"a":"one']],
        ),
        (  # a value that its schema does not admit is text
            "glm45",
            "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>one</arg_value>\n</tool_call>",
            [["call", "add", '{"a":"one"}']],
        ),
        (
            "glm45",
            "<tool_call>get_weather<arg_key>unit</arg_key><arg_value>null</arg_value></tool_call>",
            [["call", "get_weather", '{"unit":null}']],
        ),
        ("llama3_json", '{"name": "Bob", "age": 3}', [text('{"name": "Bob", "age": 3}')]),
        (
            "llama3_json",
            '{"name": "other", "parameters": {}}',
            [text('{"name": "other", "parameters": {}}')],
        ),
        ("llama3_json", 'So: {"name": "add"}', [text('So: {"name": "add"}')]),
        ("pythonic", "[1, 2]", [text("[1, 2]")]),
        ("pythonic", "[add(a=1)", [["call", "add", '{"a":1}']]),
        ("pythonic", "[add(a=x)]", [["call", "add", '{"a":}'], text("x)]")]),
        ("mistral", "[TOOL_CALLS] not json", [text("[TOOL_CALLS] not json")]),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_calls_section_end|>",
            [text("<|tool_calls_section_begin|><|tool_calls_section_end|>")],
        ),
        ("harmony", "Hi", [text("Hi")]),
        ("harmony", "<|channel|>odd<|message|>Hi", [text("<|channel|>odd<|message|>Hi")]),
        (
            "harmony",
            "<|channel|>commentary to=functions.add<|message|>1<|call|>",
            [text("<|channel|>commentary to=functions.add<|message|>1<|call|>")],
        ),
    ],
)
def test_what_is_no_call_is_text(family, output, events):
    assert read(new_reader(family), [output]).events == events
    assert read(new_reader(family), list(output)).events == events


@pytest.mark.parametrize(
    ("value", "arguments", "num_pieces"),
    [
        ("node script", '{"unit":"node script"}', 9),
        ("Nonesuch", '{"unit":"Nonesuch"}', 4),
        ("null", '{"unit":null}', 1),
        ("None", '{"unit":null}', 1),
        ('"c"', '{"unit":"c"}', 1),
        (" null ", '{"unit":null}', 1),
    ],
)
def test_text_that_may_be_null_is_shown_as_it_comes(value, arguments, num_pieces):
    reader = new_reader("glm45")
    reader.push("<tool_call>get_weather<arg_key>unit</arg_key><arg_value>")
    shown = [piece for character in value for piece in reader.push(character)]
    shown += reader.push("</arg_value></tool_call>")
    assert '{"unit":' + "".join(piece.arguments for piece in shown) == arguments
    assert len(shown) >= num_pieces


def test_content_is_not_held_back_longer_than_it_may_be_a_marker():
    reader = new_reader("hermes")
    pushed = [reader.push(piece) for piece in ("a ", "<too", "th>", " b")]
    assert ["".join(piece.text for piece in pieces) for pieces in pushed] == [
        "a", "", " <tooth>", " b",
    ]  # fmt: skip


def test_a_long_argument_costs_the_same_for_each_piece():
    reader = new_reader("qwen3_coder")
    reader.push("<function=get_weather>\n<parameter=city>\n")
    for _ in range(20_000):
        (piece,) = reader.push("word ")
        assert isinstance(piece, CallPiece)
    assert len(reader._source._text) < 50


def test_nesting_has_a_limit():
    deep = "[" * 200 + "]" * 200
    output = f'<tool_call>{{"name": "add", "arguments": {{"a": {deep}}}}}</tool_call>'
    _, (kind, rest) = read(new_reader("hermes"), [output]).events
    assert kind == "text"
    assert rest.startswith("[")


def test_python_literals_become_json():
    output = "[add(a='it\\'s \"so\"\\x41\\d\\n', b={'k': (1)})]"
    (call, rest) = read(new_reader("pythonic"), output).events
    assert call[2] == '{"a":"it\'s \\"so\\"\\u0041\\\\d\\n","b":{"k":}'
    assert rest == text("(1)})]")
    assert json.loads(call[2].removesuffix(',"b":{"k":}') + "}") == {"a": 'it\'s "so"A\\d\n'}
