"""Forms of structured output that become a grammar, and the refusals of others."""

import json
from pathlib import Path

import llguidance
import pytest

from contract.errors import InvalidArgumentError
from contract.sampling import StructuredOutput
from router.text.structured_output import MAX_BYTES, to_grammar

PATTERNS = [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(40)]
JOINED = json.dumps({"allOf": [{"properties": {"x": pattern}} for pattern in PATTERNS]})
CHAIN = json.dumps(
    {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(1500)}}
)
DOUBLED = json.dumps(
    {
        "$ref": "#/$defs/0",
        "$defs": {
            str(i): {"properties": {x: {"$ref": f"#/$defs/{i + 1}"} for x in "xy"}}
            for i in range(40)
        }
        | {"40": {"pattern": "a"}},
    }
)
TOKENIZER = Path(__file__).parents[3] / "models" / "quire-tiny-python" / "tokenizer.json"


def grammar(**form: object) -> str:
    result = to_grammar(StructuredOutput(**form))
    assert result.form == "grammar"
    return result.grammar


@pytest.fixture(scope="module")
def tokenizer():
    return llguidance.LLTokenizer(TOKENIZER.read_text())


def admits(tokenizer, grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ({"regex": "[0-9]{2}x?"}, ["12", "12x"], ["1", "12xx", "a"]),
        ({"grammar": 'start: "a" start | "b"'}, ["b", "aab"], ["a", "ba"]),
        (
            {"choice": ("red", 'a "quote"\n', "é🙂", "red")},
            ["red", 'a "quote"\n', "é🙂"],
            ["re", "redred", "é"],
        ),
        ({"json_object": True}, ["{}", '{"a": [1, 2]}'], ["[]", '{"a":1}', '{ "a": 1}']),
        (
            {"json_schema": '{"type": "array", "items": {"enum": [1, "x"]}, "maxItems": 2}'},
            ["[]", '[1, "x"]'],
            ['[1,"x"]', "[2]", "[1, 1, 1]"],
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_grammar_admits_what_the_form_does(tokenizer, form, good, bad):
    text = grammar(**form)
    assert [each for each in good if not admits(tokenizer, text, each)] == []
    assert [each for each in bad if admits(tokenizer, text, each)] == []


@pytest.mark.parametrize(
    ("form", "field", "problem"),
    [
        ({"json_schema": "{"}, "json_schema", "is not a JSON schema"),
        ({"json_schema": "[]"}, "json_schema", "is not a JSON schema: Expecting object"),
        ({"json_schema": '{"type": "objec"}'}, "json_schema", "objec"),
        ({"json_schema": '{"not": {}}'}, "json_schema", "not"),
        ({"json_schema": '{"$ref": "#"}'}, "json_schema", 'has "$ref": "#", which leads back'),
        (
            {
                "json_schema": '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b~1c"},'
                ' "b/c": {"anyOf": [{"type": "null"}, {"allOf": [{"$ref": "#/%24defs/a"}]}]}}}'
            },
            "json_schema",
            "which leads back to itself; properties or items must lie in between",
        ),
        (
            {"json_schema": '{"properties": {"x": {"$ref": "#/properties/x"}}}'},
            "json_schema",
            'has "$ref": "#/properties/x", which leads back to itself',
        ),
        (
            {"json_schema": '{"properties": {"default": {"$ref": "#/properties/default"}}}'},
            "json_schema",
            'has "$ref": "#/properties/default", which leads back to itself',
        ),
        (
            {"json_schema": '{"x-a": {"enum": {"$ref": "#/x-a/enum"}}, "$ref": "#/x-a/enum"}'},
            "json_schema",
            'has "$ref": "#/x-a/enum", which leads back to itself',
        ),
        (
            {
                "json_schema": '{"$id": "http://x/s", "properties": {"a": {"$ref":'
                ' "http://x/s#/properties/a"}}}'
            },
            "json_schema",
            'has "$ref": "http://x/s#/properties/a"; it must be "#" or begin with "#/"',
        ),
        (
            {"json_schema": '{"properties": {"a": {"$ref": "#foo", "$anchor": "foo"}}}'},
            "json_schema",
            'has "$ref": "#foo"; it must be "#" or begin with "#/"',
        ),
        (
            {
                "json_schema": '{"$ref": "#/$defs/a", "$defs": {"a": {"$id": "http://y/z",'
                ' "properties": {"b": {"$ref": "#/properties/b"}}}}}'
            },
            "json_schema",
            'has a "$id" below its top level, and a "$ref"',
        ),
        (
            {"json_schema": JOINED},
            "json_schema",
            "has up to 40 patterns and formats for one string, joined by allOf or $ref",
        ),
        (
            {"json_schema": CHAIN},
            "json_schema",
            "is nested too deeply",
        ),
        (
            {"json_schema": '{"type": "integer", "multipleOf": 999999937}'},
            "json_schema",
            "without trailing zeros, times their number, must be at most 32768",
        ),
        (
            {"json_schema": json.dumps({"anyOf": [{"multipleOf": i} for i in (101, 0.103, 107)]})},
            "json_schema",
            "has 3 or more multipleOf",
        ),
        (
            {"grammar": 'start: %json {"multipleOf": 181} %json {"multipleOf": 191}'},
            "grammar",
            "has 2 or more multipleOf",
        ),
        ({"json_schema": '{"$ref": "#/nowhere"}'}, "json_schema", "/nowhere"),
        ({"regex": "a(b"}, "regex", "unclosed group"),
        ({"regex": "(?=a)b"}, "regex", "look-around"),
        ({"regex": ""}, "regex", "is empty"),
        ({"grammar": "start: foo"}, "grammar", "foo"),
        ({"grammar": f'start: "a" %json\n{JOINED}'}, "grammar", "has up to 40 patterns"),
        ({"grammar": 'start: %json {} %json{"$ref": "#"} "a"'}, "grammar", "leads back to itself"),
        ({"grammar": "start: %json " + "[" * 10_000}, "grammar", "is nested too deeply"),
        ({"grammar": "start: %json {"}, "grammar", 'failed to parse "%json"'),
        (
            {"grammar": f' {{"grammars": [{{"json_schema": {JOINED}}}]}}'},
            "grammar",
            "is JSON; it must be Lark",
        ),
        ({"choice": ()}, "choice", "has 0 texts; it must have 1 to 1024"),
        ({"choice": ("a", "")}, "choice[1]", "is empty"),
        ({"regex": "a" * (MAX_BYTES + 1)}, "regex", f"at most {MAX_BYTES}"),
        ({"regex": "\ud800"}, "regex", "half of a surrogate pair"),
    ],
)
def test_an_invalid_form_is_refused_by_name(form, field, problem):
    with pytest.raises(InvalidArgumentError) as error:
        grammar(**form)
    assert error.value.field == f"sampling.structured.{field}"
    assert problem in str(error.value)


@pytest.mark.parametrize(
    "schema",
    [
        '{"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": false}',
        '{"type": "array", "items": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}',
        '{"const": {"$ref": "#/const"}}',
        json.dumps({"anyOf": PATTERNS}),
        json.dumps({"anyOf": [{"multipleOf": each} for each in (0.01, 0.25, 60, 7)]}),
        json.dumps({"properties": {str(i): pattern for i, pattern in enumerate(PATTERNS)}}),
        DOUBLED,
        '{"$id": "http://x", "properties": {"id": {"$ref": "#/$defs/c"}}, "$defs": {"c": {}}}',
        '{"properties": {"default": {"type": "null"}, "a": {"$ref": "#/properties/default"}}}',
        '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "null"}}}',
    ],
)
def test_schemas_may_refer_to_themselves_in_their_parts(schema):
    assert grammar(json_schema=schema)


def test_a_form_that_was_asked_for_before_is_not_worked_out_again():
    first, again = (to_grammar(StructuredOutput(regex="[a-c]{7}")) for _ in range(2))
    assert first is again


def test_a_large_form_is_not_kept():
    first, again = (to_grammar(StructuredOutput(regex="a" * 20_000)) for _ in range(2))
    assert first == again
    assert first is not again
