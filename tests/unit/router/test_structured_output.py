"""Which forms become a grammar, and how those that do not are refused."""

from pathlib import Path

import llguidance
import pytest

from contract.errors import InvalidArgumentError
from router.domain import StructuredForm, StructuredOutput
from router.text.grammar import MAX_BYTES, to_grammar

TOKENIZER = Path(__file__).parents[3] / "models" / "quire-tiny-python" / "tokenizer.json"


def grammar(form: StructuredForm, *texts: str) -> str:
    result = to_grammar(StructuredOutput(form, texts))
    assert result.form is StructuredForm.GRAMMAR
    return result.texts[0]


@pytest.fixture(scope="module")
def tokenizer():
    return llguidance.LLTokenizer(TOKENIZER.read_text())


def admits(tokenizer, grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("form", "texts", "good", "bad"),
    [
        (StructuredForm.REGEX, ("[0-9]{2}x?",), ["12", "12x"], ["1", "12xx", "a"]),
        (StructuredForm.GRAMMAR, ('start: "a" start | "b"',), ["b", "aab"], ["a", "ba"]),
        (
            StructuredForm.CHOICE,
            ("red", 'a "quote"\n', "é🙂", "red"),
            ["red", 'a "quote"\n', "é🙂"],
            ["re", "redred", "é"],
        ),
        (StructuredForm.JSON_OBJECT, (), ["{}", '{"a": [1, 2]}'], ["[]", '{"a":1}', '{ "a": 1}']),
        (
            StructuredForm.JSON_SCHEMA,
            ('{"type": "array", "items": {"enum": [1, "x"]}, "maxItems": 2}',),
            ["[]", '[1, "x"]'],
            ['[1,"x"]', "[2]", "[1, 1, 1]"],
        ),
    ],
    ids=lambda value: value.value if isinstance(value, StructuredForm) else "",
)
def test_a_grammar_admits_what_the_form_does(tokenizer, form, texts, good, bad):
    text = grammar(form, *texts)
    assert [each for each in good if not admits(tokenizer, text, each)] == []
    assert [each for each in bad if admits(tokenizer, text, each)] == []


@pytest.mark.parametrize(
    ("form", "texts", "field", "problem"),
    [
        (StructuredForm.JSON_SCHEMA, ("{",), "json_schema", "is no JSON schema"),
        (StructuredForm.JSON_SCHEMA, ("[]",), "json_schema", "is no JSON schema: Expecting object"),
        (StructuredForm.JSON_SCHEMA, ('{"type": "objec"}',), "json_schema", "objec"),
        (StructuredForm.JSON_SCHEMA, ('{"not": {}}',), "json_schema", "not"),
        (StructuredForm.REGEX, ("a(b",), "regex", "unclosed group"),
        (StructuredForm.REGEX, ("(?=a)b",), "regex", "look-around"),
        (StructuredForm.REGEX, ("",), "regex", "is empty"),
        (StructuredForm.GRAMMAR, ("start: foo",), "grammar", "foo"),
        (StructuredForm.CHOICE, (), "choice", "has 0 texts; it must have 1 to 1024"),
        (StructuredForm.CHOICE, ("a", ""), "choice[1]", "is empty"),
        (StructuredForm.REGEX, ("a" * (MAX_BYTES + 1),), "regex", f"at most {MAX_BYTES}"),
        (StructuredForm.REGEX, ("\ud800",), "regex", "half of a surrogate pair"),
    ],
)
def test_what_is_no_form_is_refused_by_name(form, texts, field, problem):
    with pytest.raises(InvalidArgumentError) as error:
        grammar(form, *texts)
    assert error.value.field == f"sampling.structured.{field}"
    assert problem in str(error.value)


def test_a_form_that_was_asked_for_before_is_not_worked_out_again():
    first, again = (
        to_grammar(StructuredOutput(StructuredForm.REGEX, ("[a-c]{7}",))) for _ in range(2)
    )
    assert first is again
