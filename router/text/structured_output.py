"""Converts a request's structured output to a grammar, which workers apply with llguidance."""

import contextlib
import functools
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final
from urllib.parse import unquote

import llguidance
from pydantic_core import from_json

from contract.errors import InvalidArgumentError
from contract.sampling import StructuredOutput
from contract.value_checks import check_count, check_unicode
from router.parsers.embedding import BY_NAME, DATA

MAX_BYTES: Final = 2**16
MAX_CHOICES: Final = 1024
MAX_WORDS: Final = 256
"""Maximum number of entries of `bad_words`."""
MAX_WORD_CHARS: Final = 128
"""Maximum number of characters of each of the `bad_words`."""
_MAX_KEPT: Final = 64
"""How many grammars to cache; many requests have the same schema."""
_MAX_KEPT_CHARS: Final = 16_384
"""Maximum length of a schema, regex or other text whose grammar is cached. The grammar may be
several times as long."""

_FIELD: Final = "sampling.structured"


_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)
_JSON_TERM: Final = re.compile(r"%json[ \t\r\n]*")
_JSON: Final = json.JSONDecoder()


def to_grammar(structured: StructuredOutput, before: str = "") -> StructuredOutput:
    """Convert a schema, regex or other form of structured output to a grammar.

    The conversion may take up to a second in extreme cases. If the output begins with another part,
    such as thinking, `before` has the grammar rules for this part. Its main rule has the name
    `before`.

    Raises:
        InvalidArgumentError: `structured` is too large, malformed, or uses an unsupported feature.
    """
    texts = _texts(structured)
    is_small = sum(map(len, texts)) <= _MAX_KEPT_CHARS
    return (_kept if is_small else _to_grammar)(structured.form, texts, before)


def _to_grammar(form: str, texts: tuple[str, ...], before: str) -> StructuredOutput:
    field = f"{_FIELD}.{form}"
    num_bytes = sum(check_unicode(field, text) for text in texts)
    if num_bytes > MAX_BYTES:
        raise InvalidArgumentError(
            field, f"has {num_bytes} bytes; it must have at most {MAX_BYTES}"
        )
    grammar = _grammar(form, texts, field)
    if before:
        grammar = _behind(before, grammar)
    if problem := llguidance.LLMatcher.validate_grammar(grammar):
        raise InvalidArgumentError(field, f"is not supported: {' '.join(problem.split())}")
    return StructuredOutput(grammar=grammar)


_kept = functools.lru_cache(_MAX_KEPT)(_to_grammar)


def _texts(structured: StructuredOutput) -> tuple[str, ...]:
    match structured.form:
        case "json_object":
            return ()
        case "choice":
            return structured.choice or ()
        case "json_schema":
            return (structured.schema_text,)
        case form:
            return (getattr(structured, form),)


def _grammar(form: str, texts: Sequence[str], field: str) -> str:
    if form == "json_object":
        return _json_grammar('{"type": "object"}', field)
    if form == "choice":
        if not 1 <= len(texts) <= MAX_CHOICES:
            raise InvalidArgumentError(
                field, f"has {len(texts)} texts; it must have 1 to {MAX_CHOICES}"
            )
        if "" in texts:
            raise InvalidArgumentError(f"{field}[{texts.index('')}]", "is empty")
        return "start: " + " | ".join(json.dumps(text) for text in dict.fromkeys(texts))
    (text,) = texts
    if not text:
        raise InvalidArgumentError(field, "is empty")
    match form:
        case "json_schema":
            return _json_grammar(text, field)
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(_with_ascii_digits(text))
        case _:
            _check_lark(text, field)
            return llguidance.LLMatcher.grammar_from_lark(text)


def _check_lark(grammar: str, field: str) -> None:
    """Check the JSON schemas in a Lark grammar; may raise InvalidArgumentError."""
    if grammar.lstrip().startswith("{"):  # llguidance would accept JSON instead of Lark
        raise InvalidArgumentError(field, "is JSON; it must be Lark")
    schemas = []
    for term in _JSON_TERM.finditer(grammar):
        try:
            schema, _ = _JSON.raw_decode(grammar, term.end())
        except ValueError:  # llguidance says why the text is not JSON
            continue
        except RecursionError:
            raise InvalidArgumentError(field, "is nested too deeply") from None
        check_refs(schema, field)
        schemas.append(schema)
    _check_multiples(schemas, field)


def _behind(before: str, grammar: str) -> str:
    """Return a grammar for a text that matches `before`, then a text that matches `grammar`."""
    parts = (
        json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    )
    whole = {"name": "whole", "lark_grammar": f"start: before @form\n{before}"}
    return json.dumps({"grammars": [whole, {**parts[0], "name": "form"}, *parts[1:]]})


def without_words(words: Sequence[str], marker_ids: Collection[int]) -> StructuredOutput:
    """Return a grammar for texts that contain none of `words`.

    The texts may also contain the special tokens `marker_ids`. The grammar lists them, because no
    text pattern matches a special token.
    """
    check_count("bad_words", len(words), MAX_WORDS)
    for i, word in enumerate(words):
        if not 1 <= len(word) <= MAX_WORD_CHARS:
            raise InvalidArgumentError(
                f"bad_words[{i}]",
                f"has {len(word)} characters; it must have 1 to {MAX_WORD_CHARS}",
            )
        check_unicode(f"bad_words[{i}]", word)
    banned = " | ".join(json.dumps(word) for word in dict.fromkeys(words))
    markers = ",".join(map(str, sorted(marker_ids)))
    more = f" (<[{markers}]> TEXT)*" if markers else ""
    return StructuredOutput(
        grammar=f"start: TEXT{more}\nTEXT: ANY & ~(ANY BANNED ANY)\n"
        f"ANY: /(.|\\n)*/\nBANNED: {banned}"
    )


def _with_ascii_digits(regex: str) -> str:
    """Return a regex whose digit escapes match 0 to 9 only, not all of Unicode's digits."""
    digits = {"d": "[0-9]", "D": "[^0-9]"}
    return _ESCAPED.sub(lambda found: digits.get(found[1], found[0]), regex)


def _json_grammar(schema: str, field: str) -> str:
    with contextlib.suppress(ValueError):  # llguidance says why the text is not JSON
        root = from_json(schema)
        check_refs(root, field)
        _check_multiples([root], field)
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(
            schema,
            overrides={
                "whitespace_flexible": False,  # otherwise a model may write endless white space
                "item_separator": ", ",
                "key_separator": ": ",
            },
        )
    except ValueError as error:
        raise InvalidArgumentError(field, f"is not a JSON schema: {error}") from None


# --- multiples ------------------------------------------------------------------------------------

_MAX_REMAINDERS: Final = 2**15
"""Limit on the division remainders that a worker enumerates when it compiles a grammar with
`multipleOf`. None of llguidance's own limits counts remainders. Quire estimates their number: the
number of `multipleOf` in the grammar, times the least common multiple of the values that
`_multiples` yields. To enumerate 100,003 remainders took 0.1 to 0.3 s, and 1,000,003 took 4 s. A
grammar of 10 alternatives, each with a `multipleOf` of about 1,000, was not compiled after a
minute."""


def _check_multiples(schemas: Iterable[object], field: str) -> None:
    num_remainders = 1
    for num, multiple in enumerate(_multiples(schemas), 1):
        num_remainders = math.lcm(num_remainders, multiple)
        if num_remainders * num > _MAX_REMAINDERS:
            raise InvalidArgumentError(
                field,
                f"has {num} or more multipleOf; their least common multiple without trailing zeros,"
                f" times their number, must be at most {_MAX_REMAINDERS}",
            )


def _multiples(schemas: Iterable[object]) -> Iterator[int]:
    """Yield each `multipleOf` as an integer, for the estimate that `_MAX_REMAINDERS` describes.

    The decimal point and trailing zeros are left out: 25 for 0.25, 36 for 3600.
    """
    pending = [*schemas]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
            multiple = value.get("multipleOf")
            if isinstance(multiple, int | float) and not isinstance(multiple, bool):
                digits = Decimal(str(multiple)).as_tuple().digits
                yield int("".join(map(str, digits)).rstrip("0") or "1")


# --- cycles ---------------------------------------------------------------------------------------

_SAME_VALUE: Final = ("allOf", "anyOf", "oneOf")
"""Keywords whose subschemas describe the same value as the schema that contains them."""
_NOT_INSIDE: Final = frozenset({*_SAME_VALUE, "$defs", "definitions"})
"""Keywords whose subschemas do not describe parts of the value. The subschemas of
`_SAME_VALUE` describe the whole value. Those of `$defs` and `definitions` are used only where a
`$ref` points to them. The subschemas of all other keywords describe parts of the value, such as
items."""
_MAX_EXCERPT_CHARS: Final = 80
_MAX_JOINED_PATTERNS: Final = 8
"""Limit on the patterns that one string must match. llguidance's time doubles with each pattern: 12
patterns `a.{N}b` take 12 ms, 16 take 0.2 to 0.6 s, and 18 take 2 to 4 s."""


def check_refs(root: object, field: str) -> None:
    """Check the `$ref` and the patterns of a schema; may raise InvalidArgumentError.

    A `$ref` must not lead back to itself without descending to a property or an item. At most
    `_MAX_JOINED_PATTERNS` patterns and formats may apply to the same string. Every `$ref` must be a
    JSON pointer into the whole schema, `root`, so that this function can follow it. Whether the
    pointer leads to a value is not checked here, because llguidance checks it.
    """
    id_to_ids: dict[int, list[int]] = {}
    id_to_ref: dict[int, str] = {}
    has_inner_id = False
    pending = [root]
    while pending:
        schema = pending.pop()
        if isinstance(schema, list):
            pending += schema
        if not isinstance(schema, dict) or id(schema) in id_to_ids:
            continue
        pending += _parts(schema)
        if isinstance(ref := schema.get("$ref"), str):
            if ref != "#" and not ref.startswith("#/"):
                raise InvalidArgumentError(
                    field, f'has "$ref": {_excerpt(ref)}; it must be "#" or begin with "#/"'
                )
            id_to_ref[id(schema)] = ref
            pending.append(_resolve(ref, root))
        has_inner_id |= schema is not root and any(
            isinstance(schema.get(name), str) for name in ("$id", "id")
        )
        id_to_ids[id(schema)] = list(map(id, _about_same_value(schema, root)))
    if has_inner_id and id_to_ref:
        raise InvalidArgumentError(
            field,
            'has a "$id" below its top level, and a "$ref"; a "$ref" must be relative to the whole'
            " schema",
        )
    try:
        TopologicalSorter(id_to_ids).prepare()
    except CycleError as error:
        ref = next(id_to_ref[id_] for id_ in error.args[1] if id_ in id_to_ref)
        raise InvalidArgumentError(
            field,
            f'has "$ref": {_excerpt(ref)}, which leads back to itself; properties or items must lie'
            " in between",
        ) from None
    try:
        num_joined = _num_joined(root, root, {})
    except RecursionError:
        raise InvalidArgumentError(field, "is nested too deeply") from None
    if num_joined > _MAX_JOINED_PATTERNS:
        raise InvalidArgumentError(
            field,
            f"has up to {num_joined} patterns and formats for one string, joined by allOf or $ref;"
            f" it must have at most {_MAX_JOINED_PATTERNS}",
        )


def _num_joined(schema: object, root: object, id_to_num: dict[int, int]) -> int:
    """Return an upper bound on the number of patterns and formats that apply to one string.

    If a schema has alternatives, the one with the most patterns counts. If it describes an object
    or a list, the part with the most patterns counts. `id_to_num` has the results so far. A `$ref`
    that leads back to a schema whose patterns are being counted counts as 0.
    """
    if isinstance(schema, list):
        return max((_num_joined(part, root, id_to_num) for part in schema), default=0)
    if not isinstance(schema, dict):
        return 0
    if id(schema) in id_to_num:
        return id_to_num[id(schema)]
    id_to_num[id(schema)] = 0
    num = ("pattern" in schema) + ("format" in schema)
    if isinstance(ref := schema.get("$ref"), str):
        num += _num_joined(_resolve(ref, root), root, id_to_num)
    for name in _SAME_VALUE:
        if isinstance(schemas := schema.get(name), list):
            nums = [_num_joined(each, root, id_to_num) for each in schemas]
            num += sum(nums) if name == "allOf" else max(nums, default=0)
    inner = {name: value for name, value in schema.items() if name not in _NOT_INSIDE}
    num += max((_num_joined(part, root, id_to_num) for part in _parts(inner)), default=0)
    id_to_num[id(schema)] = num
    return num


def _excerpt(ref: str) -> str:
    return json.dumps(ref[:_MAX_EXCERPT_CHARS])


def _parts(schema: Mapping[str, Any]) -> Iterator[object]:
    for name, value in schema.items():
        if name in BY_NAME and isinstance(value, dict):
            yield from value.values()
        elif name not in DATA:
            yield value


def _about_same_value(schema: Mapping[str, Any], root: object) -> Iterator[object]:
    if isinstance(ref := schema.get("$ref"), str):
        yield _resolve(ref, root)
    for name in _SAME_VALUE:
        if isinstance(schemas := schema.get(name), list):
            yield from schemas


def _resolve(ref: str, root: object) -> object:
    """Return the value in `root` to which a `$ref` points; None if there is none."""
    found: Any = root
    for part in unquote(ref).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(name) if isinstance(found, list) else name]
        except (LookupError, TypeError, ValueError):
            return None
    return found
