"""Turns the form that an output must have into a grammar, and checks that it is one.

The grammars are those of llguidance, which the worker follows token by token.
"""

import functools
import json
from typing import Final

import llguidance

from contract.errors import InvalidArgumentError
from router.domain import StructuredForm, StructuredOutput
from router.request.validation import check_unicode

MAX_BYTES: Final = 2**16
MAX_CHOICES: Final = 1024
_MAX_KEPT: Final = 64
"""Forms whose grammars are kept: requests often share one."""

_FIELD: Final = "sampling.structured"


@functools.lru_cache(_MAX_KEPT)
def to_grammar(structured: StructuredOutput) -> StructuredOutput:
    """Gives the same form as a grammar; takes time, up to a second for an absurd one.

    Raises:
        InvalidArgumentError: It is too large, not well-formed, or uses what is not supported.
    """
    field = f"{_FIELD}.{structured.form.value}"
    num_bytes = sum(check_unicode(field, text) for text in structured.texts)
    if num_bytes > MAX_BYTES:
        raise InvalidArgumentError(
            field, f"has {num_bytes} bytes; it must have at most {MAX_BYTES}"
        )
    grammar = _grammar(structured, field)
    if problem := llguidance.LLMatcher.validate_grammar(grammar):
        raise InvalidArgumentError(field, f"cannot be followed: {' '.join(problem.split())}")
    return StructuredOutput(StructuredForm.GRAMMAR, (grammar,))


def _grammar(structured: StructuredOutput, field: str) -> str:
    match structured.form:
        case StructuredForm.JSON_OBJECT:
            return _json_grammar('{"type": "object"}', field)
        case StructuredForm.CHOICE:
            texts = structured.texts
            if not 1 <= len(texts) <= MAX_CHOICES:
                raise InvalidArgumentError(
                    field, f"has {len(texts)} texts; it must have 1 to {MAX_CHOICES}"
                )
            if "" in texts:
                raise InvalidArgumentError(f"{field}[{texts.index('')}]", "is empty")
            return "start: " + " | ".join(json.dumps(text) for text in dict.fromkeys(texts))
    (text,) = structured.texts
    if not text:
        raise InvalidArgumentError(field, "is empty")
    match structured.form:
        case StructuredForm.JSON_SCHEMA:
            return _json_grammar(text, field)
        case StructuredForm.REGEX:
            return llguidance.LLMatcher.grammar_from_regex(text)
        case _:
            return llguidance.LLMatcher.grammar_from_lark(text)


def _json_grammar(schema: str, field: str) -> str:
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(
            schema,
            overrides={
                "whitespace_flexible": False,  # a model may go on with white space for ever
                "item_separator": ", ",
                "key_separator": ": ",
            },
        )
    except ValueError as error:
        raise InvalidArgumentError(field, f"is no JSON schema: {error}") from None
