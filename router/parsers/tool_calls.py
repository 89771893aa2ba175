"""Parses tool calls in the syntax of a model family, while the output arrives.

A *marker* is a text, such as <tool_call>, that a model writes before or after a call. The call
begins once its name is known and its arguments have begun. From then on, the arguments are passed
on as they arrive. If the text breaks the syntax before the call begins, the marker and all that
follows it are plain text. If the text breaks the syntax later, the call ends there, and the rest is
plain text.
"""

import json
import math
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pydantic_core import from_json, to_json

from router.parsers.literals import PYTHON, LiteralText
from router.parsers.pieces import Pieces, new_call_id
from router.parsers.source import MalformedError, Reading, Source

Tools = Mapping[str, Mapping[str, Any]]
"""Maps the name of each offered function to the JSON schema of its arguments."""

_NAME: Final = re.compile(r"[\w.:/-]*")
_IDENTIFIER: Final = re.compile(r"[\w.]*")
_PYTHON_NAME: Final = re.compile(r"[\w.-]*")
_MAX_NAME_CHARS: Final = 256
_KEY: Final = re.compile(r"[^<>\"\n]*")
_NULLS: Final = ("null", "None")
_QUOTE_OR_SPACE: Final = '" \t\r\n'
"""If a value that may be a string or null begins with one of these characters, the parser holds the
value back until the value's end."""
_MISTRAL_ID: Final = string.ascii_letters + string.digits


def new_mistral_id() -> str:
    """Return an id of nine letters and digits, as Mistral's templates require."""
    return "".join(secrets.choice(_MISTRAL_ID) for _ in range(9))


class Calls:
    """Collects the tool calls of one output while the output is parsed."""

    def __init__(self, source: Source, pieces: Pieces, tools: Tools | None) -> None:
        """`tools` is None if calls are plain text."""
        self.source = source
        self.pieces = pieces
        self.tools: Tools = tools or {}
        self.are_wanted = tools is not None
        self.only_offered = False
        """Whether a call of a function that was not offered is treated as plain text."""
        self.new_id = new_call_id

    def begin(self, name: str, call_id: str = "") -> None:
        """Begin a call; the text that was read before can no longer become plain text."""
        if not name or (self.only_offered and name not in self.tools):
            raise MalformedError
        self.pieces.call(name, call_id or self.new_id())
        self.source.mark()

    def object(self) -> Reading[None]:
        """Read an object as the arguments of the current call."""
        yield from self.source.literal(LiteralText(), self.pieces.arguments)
        self.source.mark()


class CallSyntax(Protocol):
    """The syntax between a call's markers."""

    def read(self, calls: Calls) -> Reading[None]:
        """Read one call; may raise MalformedError."""


@dataclass(frozen=True, slots=True)
class ObjectBody:
    """`{"name": …, "arguments": {…}}`, in any order; "parameters" may replace "arguments"."""

    def read(self, calls: Calls) -> Reading[None]:
        source = calls.source
        yield from source.skip_space()
        if not (yield from source.has("{")):
            raise MalformedError
        name = call_id = held = ""
        has_begun = False
        while True:
            yield from source.skip_space()
            key = yield from _read_string(source)
            yield from source.skip_space()
            if not (yield from source.has(":")):
                raise MalformedError
            yield from source.skip_space()
            if key in ("arguments", "parameters") and not held and not has_begun:
                held = yield from self._arguments(calls, name, call_id)
                has_begun = not held
            elif key == "name" and not name:
                name = yield from _read_string(source)
            elif key == "id" and not call_id:
                call_id = yield from _read_string(source)
                if has_begun and not (call_id.isascii() and call_id.isalnum()):
                    raise MalformedError  # an id can no longer be set; this may be another field
            elif key != "type" or (yield from _read_string(source)) != "function":
                raise MalformedError
            if has_begun:
                source.mark()
            yield from source.skip_space()
            if not (yield from source.has(",")):
                break
        yield from source.skip_space()
        if not has_begun:
            if not (yield from source.has("}")):
                raise MalformedError
            calls.begin(name, call_id)
            calls.pieces.arguments(held or "{}")
        else:
            yield from source.has("}")  # models sometimes forget it
        source.mark()

    def _arguments(self, calls: Calls, name: str, call_id: str) -> Reading[str]:
        """Read the arguments. Return their JSON, or "" if it was already passed to `calls`."""
        source = calls.source
        if (yield from source.has("null")):
            return "{}"
        if (yield from source.peek()) != "{":
            raise MalformedError
        if not name:
            return (yield from source.held_literal(LiteralText()))
        calls.begin(name, call_id)
        yield from calls.object()
        return ""


@dataclass(frozen=True, slots=True)
class NamedBody:
    """A name, a separator, and the arguments as an object."""

    separators: tuple[str, ...]
    """The texts that may separate the name from the arguments."""
    prefix: str = ""
    fence: tuple[str, str] = ("", "")
    """The text around the object."""
    has_ids: bool = False
    """Whether a call has the id functions.NAME:INDEX instead of a name."""
    id_marker: str = ""
    """The text between the name and an id; empty: no id follows the name."""

    def read(self, calls: Calls) -> Reading[None]:
        source = calls.source
        yield from source.skip_space()
        if self.prefix and not (yield from source.has(self.prefix)):
            raise MalformedError
        name, call_id = (yield from source.word(_NAME, _MAX_NAME_CHARS)), ""
        if self.has_ids:
            call_id, name = name, name.removeprefix("functions.").rpartition(":")[0]
        yield from source.skip_space()
        if self.id_marker and (yield from source.has(self.id_marker)):
            call_id = yield from source.word(_NAME, _MAX_NAME_CHARS)
        if not (yield from source.has_any(self.separators)):
            raise MalformedError
        yield from source.skip_space()
        if self.fence[0] and (yield from source.has(self.fence[0])):
            yield from source.skip_space()
        if (yield from source.peek()) != "{":
            raise MalformedError
        calls.begin(name, call_id)
        yield from calls.object()
        if self.fence[1]:
            yield from source.skip_space()
            yield from source.has(self.fence[1])


@dataclass(frozen=True, slots=True)
class MistralBody:
    """Calls as a list of objects, or one call as a name and an object.

    Older Mistral models write the list.
    """

    listed: ObjectBody
    named: NamedBody

    def read(self, calls: Calls) -> Reading[None]:
        source = calls.source
        yield from source.skip_space()
        if not (yield from source.has("[")):
            yield from self.named.read(calls)
            return
        while True:
            yield from self.listed.read(calls)
            yield from source.skip_space()
            if not (yield from source.has(",")):
                break
        yield from source.expect("]")


@dataclass(frozen=True, slots=True)
class TaggedBody:
    """A name, then the parameters: tags enclose the key and the value of each parameter.

    Values are not quoted, so the function's schema must say which values are text.
    """

    name_end: str
    key: tuple[str, str]
    value: tuple[str, str]
    trims_line_ends: bool = False
    """Whether a value stands on lines of its own; the line ends around it are not part of it."""

    def read(self, calls: Calls) -> Reading[None]:
        source, pieces = calls.source, calls.pieces
        yield from source.skip_space()
        name = yield from source.word(_NAME, _MAX_NAME_CHARS)
        if self.name_end and not (yield from source.has(self.name_end)):
            raise MalformedError
        if not self.name_end:
            yield from source.skip_space()
            if (yield from source.peek()) != "<":
                raise MalformedError
        calls.begin(name)
        pieces.arguments("{")
        try:
            yield from self._read_parameters(calls, calls.tools.get(name, {}))
        except MalformedError:
            if not source.is_over:  # the JSON of a value that was cut short must be incomplete
                pieces.arguments("}")
            raise
        pieces.arguments("}")

    def _read_parameters(self, calls: Calls, schema: Mapping[str, Any]) -> Reading[None]:
        source, pieces, separator = calls.source, calls.pieces, ""
        properties = schema.get("properties")
        while True:
            yield from source.skip_space()
            if not (yield from source.has(self.key[0])):
                break
            key = yield from self._read_key(source)
            source.mark()
            pieces.arguments(f"{separator}{_json(key)}:")
            separator = ","
            yield from self._read_value(
                calls, properties.get(key) if isinstance(properties, dict) else None
            )
            source.mark()
        if source.is_over:
            raise MalformedError

    def _read_key(self, source: Source) -> Reading[str]:
        key = yield from source.word(_KEY, _MAX_NAME_CHARS)
        if not (yield from source.has(self.key[1])):
            raise MalformedError
        if self.value[0]:
            yield from source.skip_space()
            if not (yield from source.has(self.value[0])):
                raise MalformedError
        if self.trims_line_ends:
            yield from source.has("\n")
        return key.strip()

    def _read_value(self, calls: Calls, schema: Any) -> Reading[None]:
        source, pieces = calls.source, calls.pieces
        end = self.value[1]
        ends = (f"\n{end}", end) if self.trims_line_ends else (end,)
        is_text = _is_text(schema)
        if not is_text and set(_types(schema)) == {"string", "null"}:
            if (yield from source.has_any([word + end for word in _NULLS for end in ends])):
                pieces.arguments("null")
                return
            is_text = (yield from source.peek()) not in _QUOTE_OR_SPACE
        if is_text:
            pieces.arguments('"')

            def show(text: str) -> None:
                pieces.arguments(_json(text)[1:-1])

            if not (yield from source.until(ends, show)):
                show(source.take_back())
                raise MalformedError
            pieces.arguments('"')
            return
        parts: list[str] = []
        is_whole = yield from source.until(ends, parts.append)
        if not is_whole:
            pieces.arguments(_cut("".join(parts) + source.take_back()))
            raise MalformedError
        pieces.arguments(_typed("".join(parts), schema))


@dataclass(frozen=True, slots=True)
class PythonicBody:
    """A list of Python calls with keyword arguments: `[name(key="value"), …]`."""

    def read(self, calls: Calls) -> Reading[None]:
        source = calls.source
        yield from source.skip_space()
        if not (yield from source.has("[")):
            raise MalformedError
        while True:
            yield from self._read_call(calls)
            yield from source.skip_space()
            if not (yield from source.has(",")):
                break
        yield from source.expect("]")
        source.mark()

    def _read_call(self, calls: Calls) -> Reading[None]:
        source, pieces = calls.source, calls.pieces
        yield from source.skip_space()
        name = yield from source.word(_PYTHON_NAME, _MAX_NAME_CHARS)
        if not (yield from source.has("(")):
            raise MalformedError
        calls.begin(name)
        pieces.arguments("{")
        try:
            yield from self._read_arguments(calls)
        except MalformedError:
            if not source.is_over:
                pieces.arguments("}")
            raise
        pieces.arguments("}")
        source.mark()

    def _read_arguments(self, calls: Calls) -> Reading[None]:
        source, pieces, separator = calls.source, calls.pieces, ""
        while True:
            yield from source.skip_space()
            if (yield from source.has(")")):
                return
            if separator:
                if not (yield from source.has(",")):
                    raise MalformedError
                yield from source.skip_space()
            key = yield from source.word(_IDENTIFIER, _MAX_NAME_CHARS)
            yield from source.skip_space()
            if not (yield from source.has("=")):
                raise MalformedError
            source.mark()
            pieces.arguments(f"{separator}{_json(key)}:")
            separator = ","
            yield from source.literal(LiteralText(PYTHON), pieces.arguments)
            source.mark()


@dataclass(frozen=True, slots=True)
class Syntax:
    """The syntax of calls in a model family."""

    body: CallSyntax
    call: tuple[str, str] = ("", "")
    """The markers around each call."""
    section: tuple[str, str] | None = None
    """The markers around all calls."""
    separator: str = ""
    """The text after which another call may follow without a marker; empty: there is no such
    text."""
    at_start: bool = False
    """Whether an output may begin with a call without a marker. Such a call must name an offered
    function, because ordinary text may look like a call."""
    is_section_optional: bool = False
    has_short_ids: bool = False

    @property
    def openers(self) -> tuple[str, ...]:
        """The markers that may begin a call in the middle of text."""
        openers = [] if self.section is None else [self.section[0]]
        if self.call[0] and (self.section is None or self.is_section_optional):
            openers.append(self.call[0])
        return tuple(openers)

    def read(self, calls: Calls) -> Reading[None]:
        """Read an output to its end."""
        source, pieces = calls.source, calls.pieces
        calls.only_offered = self.at_start
        if self.has_short_ids:
            calls.new_id = new_mistral_id
        if self.at_start:
            source.mark()
            yield from self._try(calls, "")
        while True:
            opener = yield from source.until(self.openers, pieces.text, trims=True)
            if not opener:
                break
            yield from self._try(calls, opener)
        rest = source.take_back()
        pieces.text(rest.rstrip() if pieces.num_calls else rest)

    def _try(self, calls: Calls, opener: str) -> Reading[None]:
        """Read calls; treat text that breaks the syntax as plain text."""
        try:
            if self.section is not None and opener == self.section[0]:
                yield from self._read_section(calls, self.section[1])
            else:
                yield from self._read_calls(calls)
            calls.source.mark()
        except MalformedError:
            rest = calls.source.take_back()
            calls.pieces.text(rest if rest.strip() or not calls.pieces.num_calls else "")

    def _read_section(self, calls: Calls, end: str) -> Reading[None]:
        source, num_before = calls.source, calls.pieces.num_calls
        while True:
            yield from source.skip_space()
            if calls.pieces.num_calls > num_before and (
                source.is_over or (yield from source.has(end))
            ):
                return
            if self.call[0] and not (yield from source.has(self.call[0])):
                raise MalformedError
            yield from self._read_call(calls)

    def _read_calls(self, calls: Calls) -> Reading[None]:
        yield from self._read_call(calls)
        while self.separator:
            yield from calls.source.skip_space()
            if not (yield from calls.source.has(self.separator)):
                return
            yield from self._read_call(calls)

    def _read_call(self, calls: Calls) -> Reading[None]:
        yield from self.body.read(calls)
        if self.call[1]:
            yield from calls.source.skip_space()
            yield from calls.source.expect(self.call[1])
            calls.source.mark()


def _read_string(source: Source) -> Reading[str]:
    if (yield from source.peek()) != '"':
        raise MalformedError
    literal = yield from source.held_literal(LiteralText())
    try:
        text = from_json(literal)
    except ValueError as error:  # half of a surrogate pair
        raise MalformedError from error
    assert isinstance(text, str)
    return text


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _types(schema: Any) -> Sequence[str]:
    """Return the types that a schema allows; empty: any."""
    if not isinstance(schema, Mapping):
        return ()
    said = schema.get("type")
    if isinstance(said, str):
        return (said,)
    if isinstance(said, list):
        return [name for name in said if isinstance(name, str)]
    for word in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(word), list):
            types = [_types(part) for part in parts]
            return [name for part in types for name in part] if all(types) else ()
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return ("string",)
    return ()


def _is_text(schema: Any) -> bool:
    """Whether a value is always text, because it has no schema or a schema for strings only."""
    return schema is None or list(_types(schema)) == ["string"]


def _cut(text: str) -> str:
    """Return incomplete JSON for a value that was cut short."""
    value = LiteralText()
    _, at = value.push(text, 0)
    return text if at >= len(text.rstrip()) else _json(text)[:-1]


_PYTHON_WORDS: Final = {"True": True, "False": False, "None": None}
_TYPE_OF: Final = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


def _typed(text: str, schema: Any) -> str:
    """Return a value's JSON: a string, unless `text` is a literal of a type in `schema`."""
    types, stripped = _types(schema), text.strip()
    try:
        value = (
            _PYTHON_WORDS[stripped]
            if stripped in _PYTHON_WORDS
            else from_json(stripped, allow_inf_nan=False)
        )
    except ValueError:
        return _json(text)
    if types and not any(name in types for name in _TYPE_OF[type(value)]):
        return _json(text)
    if isinstance(value, float) and not math.isfinite(value):
        return stripped  # such as 1e999, which is valid JSON but not a float
    return to_json(value).decode()
