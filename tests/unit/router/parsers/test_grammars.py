"""Readers read each output that a family's grammar admits; thinking keeps its budget."""

import json
import random

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from router_tokenizers import byte_level_bpe

from contract.errors import UnimplementedError
from contract.sampling import StructuredOutput
from router.parsers.call_grammar import (
    _MARKER,
    CallGrammar,
    ForcedFunction,
    inline_json,
    thinking_grammar,
)
from router.parsers.families import THINKING_FAMILIES, TOOL_FAMILIES
from router.parsers.harmony_grammar import _MARKERS, message_grammar
from router.text.structured_output import to_grammar, without_words
from router.text.token_bytes import token_table
from tests.reading import new_reader, read

END = 1
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["c", "f"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
ADD = {
    "type": "object",
    "properties": {"a": {"type": "number"}},
    "required": ["a"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "add": ADD}
FUNCTIONS = [ForcedFunction(name, schema) for name, schema in SCHEMAS.items()]
WRITTEN = {name: family.written for name, family in TOOL_FAMILIES.items() if family.written}


class Model:
    """Draws any tokens that a grammar admits."""

    def __init__(self, markers, *, are_tokens):
        self._tokenizer = byte_level_bpe()
        if are_tokens:
            self._tokenizer.add_special_tokens(sorted(markers))
        self._pieces = token_table(self._tokenizer, frozenset()).pieces
        self._matched = LLTokenizer(
            self._tokenizer.to_str(), n_vocab=len(self._pieces), eos_token=[END]
        )

    def token_id(self, text):
        return self._tokenizer.token_to_id(text)

    def admits(self, form, text):
        matcher = LLMatcher(self._matched, form.grammar, log_level=0)
        token_ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(token_ids) == len(token_ids)

    def write(self, form, rng, max_tokens=400):
        """Return an output, or None if it was cut short."""
        matcher = LLMatcher(self._matched, form.grammar, log_level=0)
        data = b""
        for _ in range(max_tokens):
            if matcher.is_accepting() and rng.random() < 0.2:
                return data.decode(errors="replace")
            mask = matcher.compute_bitmask()
            admitted = [i for i in range(END + 1, len(self._pieces)) if mask[i // 8] >> i % 8 & 1]
            if not admitted:
                return data.decode(errors="replace")
            # Mostly tokens that end a text, because others make it long.
            closing = [i for i in admitted if self._pieces[i][:1] in b'"}]<\n']
            token_id = rng.choice(closing if closing and rng.random() < 0.5 else admitted)
            matcher.consume_token(token_id)
            data += self._pieces[token_id]
        return None


def markers_of(written):
    parts = [written.call, written.first, written.last, written.parameter]
    return {marker for part in parts for marker in _MARKER.findall(part)}


@pytest.mark.parametrize("are_tokens", [True, False])
@pytest.mark.parametrize("family", WRITTEN)
def test_what_is_forced_is_read_as_valid_calls(family, are_tokens):
    written = WRITTEN[family]
    model = Model(markers_of(written), are_tokens=are_tokens)
    num_calls = []
    for may_be_several in (False, True):
        calls = CallGrammar(written, model.token_id).calls(FUNCTIONS, may_be_several=may_be_several)
        form = to_grammar(StructuredOutput(grammar=calls))
        rng = random.Random(5)
        outputs = [text for _ in range(24) if (text := model.write(form, rng)) is not None]
        assert len(outputs) > 1
        for output in outputs:
            found = read(new_reader(family, tools=SCHEMAS), [output])
            assert found.calls, output
            assert not found.text.strip(), output
            for name, arguments in found.calls:
                jsonschema.validate(arguments, SCHEMAS[name])
            num_calls.append(len(found.calls))
            assert may_be_several or len(found.calls) == 1
    assert written.is_alone or written.parameter or max(num_calls) > 1


def test_a_strict_call_may_stand_in_any_text():
    model = Model({"<tool_call>", "</tool_call>", "<think>", "</think>"}, are_tokens=True)
    thinking = thinking_grammar(
        THINKING_FAMILIES["think"], model.token_id, has_begun=False, max_tokens=3
    )
    grammar = CallGrammar(WRITTEN["hermes"], model.token_id).calls_in_text(FUNCTIONS, thinking)
    form = to_grammar(StructuredOutput(grammar=grammar), thinking.before("text"))
    call = '<tool_call>\n{"name": "add", "arguments": {"a": %s}}\n</tool_call>'
    assert model.admits(form, "Hello.")
    assert model.admits(form, f"<think>ab</think>\n\nHi {call % 1} and {call % 2}.")
    assert not model.admits(form, f"Hi {call % 'true'}")
    assert not model.admits(form, "<think>abcdefgh")


@pytest.mark.parametrize("are_tokens", [True, False])
@pytest.mark.parametrize(
    ("family", "call", "texts"),
    [
        (
            "llama3_json",
            '{"name": "add", "parameters": {"a": %s}}',
            ["Hello.", '{"a": {"name": 1}}', "[1]", '\n{ "names": 1}', 'So: {"name": "add"}', ""],
        ),
        ("pythonic", "[add(a=%s)]", ["Hello.", "[1, 2]", "[sub(a=1)]", "so: [add(b=1)]", "[add]"]),
    ],
)
def test_a_strict_call_without_a_marker_is_told_from_text(family, call, texts, are_tokens):
    marker = WRITTEN[family].marker
    model = Model({marker}, are_tokens=are_tokens)
    grammar = CallGrammar(WRITTEN[family], model.token_id).calls_in_text(FUNCTIONS, None)
    form = to_grammar(StructuredOutput(grammar=grammar))
    for text in texts:
        assert model.admits(form, text)
        assert not read(new_reader(family, tools=SCHEMAS), [text]).calls
    assert model.admits(form, call % 1)
    between = WRITTEN[family].between
    two = (call % 1)[:-1] + between + (call % 2)[1:] if family == "pythonic" else (
        f"{call % 1}{between}{call % 2}"
    )  # fmt: skip
    assert model.admits(form, two)
    assert len(read(new_reader(family, tools=SCHEMAS), [two]).calls) == 2
    grammar = CallGrammar(WRITTEN[family], model.token_id).calls_in_text(
        FUNCTIONS, None, may_be_several=False
    )
    alone = to_grammar(StructuredOutput(grammar=grammar))
    assert model.admits(alone, call % 1)
    assert model.admits(alone, texts[0])
    assert not model.admits(alone, two)
    for wrong in (call % "true", f" {call % 1}", f"{call % 1} Hi", f"Hi {marker}{call % 1}"):
        assert not model.admits(form, wrong)


def test_python_calls_have_parameters_between_commas():
    model = Model(set(), are_tokens=False)
    properties = {"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"type": "string"}}
    for required, fits, misfits in (
        ([], ["", "a=1", "b=True", 'c="x"', 'a=1, c="x"', "a=1, b=False"], [", a=1", "b=true"]),
        (["b"], ["b=True", "a=1, b=True", 'b=True, c="x"'], ["", "a=1", 'c="x"', "b=True, a=1"]),
        (["a", "c"], ['a=1, c="x"', 'a=1, b=True, c="it\'s"'], ["a=1", "a=1, ", 'c="x"', "c='x'"]),
    ):
        schema = {"type": "object", "properties": properties, "required": required}
        grammar = CallGrammar(WRITTEN["pythonic"], model.token_id)
        functions = [ForcedFunction("f-1", schema)]
        form = to_grammar(StructuredOutput(grammar=grammar.calls(functions, may_be_several=False)))
        for arguments in fits:
            assert model.admits(form, f"[f-1({arguments})]"), arguments
            assert read(new_reader("pythonic", tools={"f-1": {}}), [f"[f-1({arguments})]"]).calls
        for arguments in misfits:
            assert not model.admits(form, f"[f-1({arguments})]"), arguments
    with pytest.raises(UnimplementedError, match="'a-b'; with this model"):
        CallGrammar(WRITTEN["pythonic"], model.token_id).calls(
            [ForcedFunction("f", {"properties": {"a-b": {}}})], may_be_several=False
        )


def test_a_call_that_must_be_alone_ends_the_output():
    model = Model({"[TOOL_CALLS]", "[ARGS]"}, are_tokens=True)
    call = '[TOOL_CALLS]add[ARGS]{"a": 1}'
    for may_be_several in (False, True):
        grammar = CallGrammar(WRITTEN["mistral_v13"], model.token_id).calls_in_text(
            FUNCTIONS, None, may_be_several=may_be_several
        )
        form = to_grammar(StructuredOutput(grammar=grammar))
        assert model.admits(form, "Hi.")
        assert model.admits(form, f"Hi.{call}")
        assert model.admits(form, f"Hi.{call}{call}") == may_be_several
        assert model.admits(form, f"Hi.{call}!") == may_be_several


def test_a_strict_call_may_follow_messages():
    markers = {f"<|{name}|>" for name in _MARKERS}
    model = Model(markers, are_tokens=True)

    def form_of(begun):
        thought = message_grammar(model.token_id, begun, None)
        calls = CallGrammar(WRITTEN["harmony"], model.token_id)
        return to_grammar(StructuredOutput(grammar=calls.calls_in_text(FUNCTIONS, thought)))

    form = form_of("")
    thought = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant"
    header = "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>"
    call = header % "add" + '{"a": 1}'
    for right, calls in (
        (f"{thought}<|channel|>final<|message|>Hello.", []),
        (call, [("add", {"a": 1})]),
        (f"{thought}{thought}{call}", [("add", {"a": 1})]),
    ):
        assert model.admits(form, right)
        assert read(new_reader("harmony", tools=SCHEMAS), [right]).calls == calls
    for wrong in (
        thought + header % "add" + '{"a": true',
        thought + header % "sub",
        f"{thought}<|channel|>analysis to=functions.add",
        f"{thought} to=functions.add<|channel|>",
        " to=functions.add",
        "I add.",
    ):
        assert not model.admits(form, wrong)
    form = form_of("analysis")
    assert model.admits(form, f"I add.<|end|><|start|>assistant{call}")
    less = Model(markers - {"<|end|>"}, are_tokens=True)
    assert message_grammar(less.token_id, "", None) is None
    calls = CallGrammar(WRITTEN["harmony"], less.token_id)
    assert calls.calls_in_text(FUNCTIONS, None) is None


HARMONY = {f"<|{name}|>" for name in _MARKERS}
NEXT = "<|end|><|start|>assistant"


def thought_of(num_tokens):
    return f"<|channel|>analysis<|message|>{'zqxjkv'[:num_tokens]}"


@pytest.mark.parametrize("max_tokens", [0, 2, None])
def test_each_message_of_thinking_has_the_budget(max_tokens):
    model = Model(HARMONY, are_tokens=True)
    note = "<|channel|>commentary<|message|>I add."
    for begun, before in (("", ""), ("analysis", "zq"), ("final", "Hi")):
        messages = message_grammar(model.token_id, begun, max_tokens)
        call = to_grammar(StructuredOutput(choice=("!",)), messages.before("call"))
        for form, answer in (
            (to_grammar(StructuredOutput(grammar=messages.text())), "<|channel|>final<|message|>!"),
            (call, "!"),
        ):
            if begun:
                fits = max_tokens != 0 or begun == "final"
                assert model.admits(form, f"{before}{NEXT}{answer}") == fits
                assert model.admits(form, f"{before}k{NEXT}{answer}") == (
                    begun == "final" or max_tokens is None
                )
                continue
            assert model.admits(form, answer)
            assert model.admits(form, f"{note}{NEXT}{answer}")
            for num_tokens in range(1, 5):
                thought = thought_of(num_tokens)
                fits = max_tokens is None or num_tokens <= max_tokens
                assert model.admits(form, f"{thought}{NEXT}{answer}") == fits
                again = f"{thought}{NEXT}{note}{NEXT}{thought}{NEXT}{answer}"
                assert model.admits(form, again) == fits
                twice = f"{thought}{NEXT}{thought}{NEXT}{answer}"
                assert model.admits(form, twice) == (max_tokens is None)


def test_a_form_follows_messages():
    model = Model(HARMONY, are_tokens=True)
    header = "<|channel|>final <|constrain|>json<|message|>"
    for begun, before, fits in (
        ("", f"{thought_of(2)}{NEXT}{header}", True),
        ("", header, True),
        ("", "<|channel|>final<|message|>", True),
        ("", "", False),
        ("analysis", f"I add.{NEXT}{header}", True),
        ("final", "", True),
        ("final", header, False),
    ):
        messages = message_grammar(model.token_id, begun, None)
        form = to_grammar(StructuredOutput(json_schema=ADD), messages.before("form"))
        assert model.admits(form, f'{before}{{"a": 1}}') == fits
        assert not model.admits(form, f"{before}Hi")


@pytest.mark.parametrize("family", WRITTEN)
def test_an_output_is_calls_or_has_a_form(family):
    """Both alternatives can be read; text that is neither is not admitted."""
    written = WRITTEN[family]
    is_harmony = TOOL_FAMILIES[family].is_harmony
    markers = markers_of(written) | (HARMONY if is_harmony else set())
    model = Model(markers, are_tokens=True)
    thought = message_grammar(model.token_id, "", None) if is_harmony else None
    schema = {"type": "object", "properties": {"yes": {"const": 1}}, "required": ["yes"]}
    grammar = CallGrammar(written, model.token_id).calls_or_form(
        FUNCTIONS, inline_json({**schema, "additionalProperties": False}), thought,
        may_be_several=True,
    )  # fmt: skip
    form = to_grammar(StructuredOutput(grammar=grammar))
    answer = '{"yes": 1}'
    if thought is not None:
        answer = f"<|channel|>final<|message|>{answer}"
    assert model.admits(form, answer)
    (text,) = [event[1] for event in read(new_reader(family, tools=SCHEMAS), [answer]).events]
    assert text == '{"yes": 1}'
    assert not model.admits(form, "Hi")
    assert not model.admits(form, f"{answer} ")
    calls = CallGrammar(written, model.token_id).calls(FUNCTIONS, may_be_several=False)
    rng, outputs = random.Random(7), to_grammar(StructuredOutput(grammar=calls))
    call = next(text for _ in range(99) if (text := model.write(outputs, rng)) is not None)
    assert model.admits(form, call)
    assert len(read(new_reader(family, tools=SCHEMAS), [call]).calls) == 1


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 3, None])
def test_thinking_ends_when_its_budget_is_used(has_begun, max_tokens):
    model = Model({"<think>", "</think>"}, are_tokens=True)
    thinking = thinking_grammar(
        THINKING_FAMILIES["think"], model.token_id, has_begun=has_begun, max_tokens=max_tokens
    )
    begin = "" if has_begun else "<think>"
    schema = json.dumps(ADD)
    for structured, output in (
        (StructuredOutput(grammar=thinking.text()), "any <text>"),
        (StructuredOutput(json_schema=schema), '{"a": 1}'),
        (StructuredOutput(choice=("yes", "no")), "yes"),
        (StructuredOutput(regex=r"\d+"), "12"),
    ):
        form = to_grammar(structured, thinking.before("text"))
        for num_tokens in range(6):
            thought = "zqxjkv"[:num_tokens]  # a token for each
            fits = max_tokens is None or num_tokens <= max_tokens
            assert model.admits(form, f"{begin}{thought}</think>\n\n{output}") == fits
        assert has_begun or model.admits(form, output)
    free = to_grammar(StructuredOutput(grammar=thinking.text()), thinking.before("text"))
    again = f"{begin}</think>a <think>{'z' * 5}"
    assert model.admits(free, again) == (max_tokens is None)


def test_thinking_whose_markers_are_text_has_no_grammar():
    model = Model(set(), are_tokens=False)
    thinking = THINKING_FAMILIES["think"]
    assert thinking_grammar(thinking, model.token_id, has_begun=True, max_tokens=1) is None


@pytest.mark.parametrize("names", [{}, {"$schema": "http://x/draft", "$id": "http://x/f"}])
@pytest.mark.parametrize("family", ["glm45", "llama3_json"])
def test_refs_are_relative_to_the_whole_schema_of_a_function(family, names):
    """One family has a schema for each parameter, the other one for the call."""
    count = {"type": "integer"}
    schema = {
        **names,
        "type": "object",
        "properties": {
            "a/b": count,
            "b": {"$ref": "#/properties/a~1b"},
            "c": {"$ref": "#/$defs/c"},
            "next": {"$ref": "#"},
            "d": {"enum": [{"$ref": "#"}]},
        },
        "additionalProperties": False,
        "$defs": {"c": {"type": "array", "items": count}},
    }
    written = WRITTEN[family]
    model = Model(markers_of(written), are_tokens=True)
    grammar = CallGrammar(written, model.token_id).calls_or_form(
        [ForcedFunction("f", schema)], inline_json({"const": 0}), None, may_be_several=False
    )
    form = to_grammar(StructuredOutput(grammar=grammar))
    values = {"b": "1", "c": "[1]", "next": '{"b": 1, "next": {}}', "d": '{"$ref": "#"}'}
    if family == "glm45":
        pairs = (
            f"\n<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>"
            for name, value in values.items()
        )
        call = f"<tool_call>f{''.join(pairs)}\n</tool_call>"
    else:
        pairs = (f'"{name}": {value}' for name, value in values.items())
        call = f'{{"name": "f", "parameters": {{{", ".join(pairs)}}}}}'
    assert model.admits(form, call)
    assert not model.admits(form, call.replace("1", '"x"'))


def test_what_a_tagged_value_cannot_follow_is_refused():
    schema = {"properties": {"city": {"type": "string", "pattern": "^P"}}}
    grammar = CallGrammar(WRITTEN["glm45"], lambda _: None)
    with pytest.raises(UnimplementedError, match="'city' with pattern"):
        grammar.calls([ForcedFunction("f", schema)], may_be_several=False)


def test_bad_words_are_in_no_part_of_an_output():
    model = Model({"<think>", "</think>"}, are_tokens=True)
    markers = {model.token_id("<think>"), model.token_id("</think>")}
    form = to_grammar(without_words(["bad", "the fox"], markers))
    assert model.admits(form, "<think>is ba</think>d, the fo")
    assert not model.admits(form, "it is bad")
    assert not model.admits(form, "</think>the fox")


def test_digits_of_a_regex_are_ascii():
    model = Model(set(), are_tokens=False)
    for regex, text, fits in (
        (r"\d+", "12", True),
        (r"\d+", "٣", False),
        (r"[\d_]+", "1_", True),
        (r"[\d_]+", "٣", False),
        (r"\D", "٣", True),
        (r"\\d", "\\d", True),
    ):
        assert model.admits(to_grammar(StructuredOutput(regex=regex)), text) == fits
