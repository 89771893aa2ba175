"""Grammars for thinking within a budget, and for tool calls in the syntax of a model family.

The grammars are in llguidance's dialect of Lark. Models write most markers, such as <tool_call>, as
single tokens. For such a marker the grammar contains the token's id, which ordinary text cannot
match.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from contract.errors import UnimplementedError
from router.parsers.embedding import embedded, with_refs_below
from router.parsers.families import Written
from router.parsers.harmony_grammar import Answer, MessageGrammar
from router.parsers.thinking import Thinking

TokenId: TypeAlias = Callable[[str], int | None]
"""Returns the id of the token with this text; None: no single token has this text."""

_MARKER: Final = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]|◁[^◁▷]+▷")
_PLACE: Final = re.compile("(NAME|ARGUMENTS|INDEX|CALLID|KEY|VALUE)")
_OF_STRINGS: Final = ("pattern", "format", "minLength", "maxLength")
_WHOLE: Final = "/$defs/parameters"
"""A JSON pointer into the schema of one parameter. If that schema has a `$ref` into the schema of
all parameters, a copy of the schema of all parameters is inserted at this pointer."""

JSON_OPTIONS: Final[Mapping[str, Any]] = {
    "whitespace_flexible": False,  # otherwise a model may write endless white space
    "item_separator": ", ",
    "key_separator": ": ",
}


@dataclass(frozen=True, slots=True)
class ForcedFunction:
    """A function, and the schema that its arguments must follow."""

    name: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ThinkingGrammar:
    """The grammar of thinking within a budget.

    `begin` and `end` are the ids of the tokens that begin and end thinking.
    """

    begin: int
    end: int
    has_begun: bool
    """Whether the prompt ends within thinking."""
    max_tokens: int | None
    """Maximum number of tokens of each section of thinking; None: no limit."""

    def before(self, _: Answer) -> str:
        """Return the rule `before`, which matches the thinking before an answer.

        The thinking is optional; if the prompt has begun it, the rule matches the rest.
        """
        thought = f"{self._thought} SPACE"
        body = (
            f"<[{self.begin}]>? {thought}" if self.has_begun else f"(<[{self.begin}]> {thought})?"
        )
        return f"before: {body}\nSPACE: /\\s{{0,4}}/"

    def text(self) -> str:
        """Return a grammar for text that may contain any number of sections of thinking."""
        free = f"<[^{self.begin}]>*"
        return f"start: {free} (<[{self.begin}]> {self._thought} {free})*"

    @property
    def _thought(self) -> str:
        if self.max_tokens == 0:
            return f"<[{self.end}]>"
        count = "*" if self.max_tokens is None else f"{{0,{self.max_tokens}}}"
        return f"<[^{self.end}]>{count} <[{self.end}]>"


def thinking_grammar(
    thinking: Thinking, token_id: TokenId, *, has_begun: bool, max_tokens: int | None
) -> ThinkingGrammar | None:
    """Return the grammar for an output's thinking; None if a marker is not a single token."""
    begin, end = token_id(thinking.begin), token_id(thinking.end)
    if begin is None or end is None:
        return None
    return ThinkingGrammar(begin, end, has_begun, max_tokens)


class CallGrammar:
    """Makes a grammar for calls in a model family's syntax; each object makes only one grammar."""

    def __init__(self, written: Written, token_id: TokenId) -> None:
        self._written = written
        self._token_id = token_id
        self._rules: list[str] = []

    def calls(self, functions: Sequence[ForcedFunction], *, may_be_several: bool) -> str:
        """Return a grammar for one call of any function, or more calls if `may_be_several`."""
        body = self._body(functions, may_be_several=may_be_several)
        return self._with_rules(f"start: {body}")

    def calls_in_text(
        self,
        functions: Sequence[ForcedFunction],
        thought: ThinkingGrammar | MessageGrammar | None,
        *,
        may_be_several: bool = True,
    ) -> str | None:
        """Return a grammar for text in which the model may call any of the functions.

        Returns None if a call's first marker is not a single token, because then a grammar cannot
        tell text from the beginning of a call.
        """
        if self._written.is_alone:
            if not isinstance(thought, MessageGrammar):
                return None
            return self._with_rules(thought.text(self._body(functions)))
        if self._written.like_call:
            return self._calls_or_text(functions, may_be_several=may_be_several)
        opener = _MARKER.match(self._written.first or self._written.call)
        opener_id = None if opener is None else self._token_id(opener[0])
        if opener_id is None:
            return None
        marks = [opener_id]
        if isinstance(thought, ThinkingGrammar):
            marks = sorted([opener_id, thought.begin])
        free = f"<[^{','.join(map(str, marks))}]>*"
        section = self._body(functions, may_be_several=may_be_several)
        sections = f"(section {free})*" if may_be_several else "section?"
        return self._with_rules(f"start: {free} {sections}\nsection: {section}")

    def calls_or_form(
        self,
        functions: Sequence[ForcedFunction],
        form: str,
        thought: ThinkingGrammar | MessageGrammar | None,
        *,
        may_be_several: bool,
    ) -> str:
        """Return a grammar for an output that is either calls or the term `form`."""
        is_json = not self._written.first and self._written.call.startswith("{")
        calls = self._body(functions, may_be_several=may_be_several, are_objects=is_json)
        if isinstance(thought, MessageGrammar):
            return self._with_rules(thought.form(form, calls))
        return self._with_rules(f"start: {calls} | {form}")

    def _calls_or_text(self, functions: Sequence[ForcedFunction], *, may_be_several: bool) -> str:
        """Return a grammar for calls, or for text that does not begin like a call.

        The lexer takes the term that matches most characters. If a call began with several short
        terms, the term TEXT would match more characters and win. So the first call's whole
        beginning, up to its arguments, is one string of the grammar.
        """
        written = self._written
        calls = self._body(functions, may_be_several=may_be_several, are_whole=True)
        names = "|".join(re.escape(function.name) for function in functions)
        like_call = written.like_call.replace("NAMES", names)
        return self._with_rules(
            f"start: {calls} | TEXT\n"
            f"TEXT: ANY & ~(/{like_call}/ ANY) & ~(ANY {json.dumps(written.marker)} ANY)\n"
            "ANY: /(.|\\n)*/"
        )

    def _body(
        self,
        functions: Sequence[ForcedFunction],
        *,
        may_be_several: bool = False,
        are_objects: bool = False,
        are_whole: bool = False,
    ) -> str:
        """Return a term for calls.

        `are_objects`: whether each call is one JSON term. `are_whole`: whether all text before the
        first call's arguments is one string of the grammar.
        """
        written = self._written
        may_be_several &= not written.is_alone
        call = self._options(functions, are_objects=are_objects)
        first = f"{self._literal(written.first)} {call}"
        if are_whole and written.first:
            first = self._options(functions, before=written.first)
        more = f"({self._literal(written.between)} {call})*" if may_be_several else ""
        return f"{first} {more} {self._literal(written.last)}".strip()

    def _options(
        self, functions: Sequence[ForcedFunction], *, before: str = "", are_objects: bool = False
    ) -> str:
        """Return the name of a rule for one call of any function."""
        rules = [
            self._rule(
                "call",
                inline_json(_call_schema(function))
                if are_objects
                else self._call(function, before),
            )
            for function in functions
        ]
        return self._rule("calls_", " | ".join(rules))

    def _with_rules(self, start: str) -> str:
        return "\n".join([start, *self._rules])

    def _call(self, function: ForcedFunction, before: str) -> str:
        parts, text = [], before
        for part in _PLACE.split(self._written.call):
            match part:
                case "NAME":
                    text += function.name
                    continue
                case "INDEX":
                    term = "/[0-9]{1,3}/"
                case "CALLID":
                    term = "/[a-zA-Z0-9]{9}/"
                case "ARGUMENTS" if self._written.parameter:
                    term = self._parameters(function)
                case "ARGUMENTS":
                    term = inline_json(function.schema)
                case _:
                    text += part
                    continue
            parts += [self._literal(text), term]
            text = ""
        return _joined([*parts, self._literal(text)])

    def _parameters(self, function: ForcedFunction) -> str:
        """Return a term for the parameters of a call, in the schema's order."""
        properties = function.schema.get("properties")
        if not isinstance(properties, dict):
            return ""
        required = function.schema.get("required")
        rules, are_required = [], []
        for key, schema in properties.items():
            rules.append(self._rule("parameter", self._parameter(function, key, schema)))
            are_required.append(isinstance(required, list) and key in required)
        between = self._literal(self._written.between_parameters)
        if not between:
            return " ".join(
                rule if is_required else f"{rule}?"
                for rule, is_required in zip(rules, are_required, strict=True)
            )
        # Go from the last parameter to the first. After each round, `more` is what may follow the
        # parameter of the next round, and `options` has an alternative for each parameter that may
        # come first.
        more, may_be_none = "", True
        options: list[str] = []
        for rule, is_required in zip(reversed(rules), reversed(are_required), strict=True):
            begun = _joined([rule, more])
            options = [begun] if is_required else [begun, *options]
            may_be_none &= not is_required
            also = f"{between} {rule}"
            more = self._rule("more", _joined([also if is_required else f"({also})?", more]))
        whole = " | ".join(options)
        return f"({whole}){'?' if may_be_none else ''}" if whole else ""

    def _parameter(self, function: ForcedFunction, key: str, schema: Any) -> str:
        before, _, after = self._written.parameter.partition("VALUE")
        if self._written.is_python and not key.isidentifier():
            raise UnimplementedError(
                f"the function {function.name!r} has a parameter {key!r}; with this model it must"
                " be a name of letters, digits and _"
            )
        head = self._literal(before.replace("KEY", key))
        kind = schema.get("type") if isinstance(schema, dict) else None
        if self._written.is_python and kind == "boolean":
            return f'{head} ("True" | "False")'
        if kind != "string" or self._written.is_python:
            value = with_refs_below(schema, _WHOLE)
            if value != schema:  # if so, the parameter refers to the whole schema
                value = {**value, "$defs": {"parameters": embedded(function.schema, _WHOLE)}}
            return _joined([head, inline_json(value), self._literal(after)])
        if unknown := [word for word in _OF_STRINGS if word in schema]:
            raise UnimplementedError(
                f"the function {function.name!r} has a parameter {key!r} with {unknown[0]}; this"
                " model writes strings without quotes, so only enum and const can be enforced"
            )
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if choices is not None:
            options = " | ".join(json.dumps(str(choice)) for choice in choices)
            return f"{head} ({options}) {self._literal(after)}"
        if self._token_id(after.strip()) is not None:
            return f"{head} /(.|\\n)*/ {self._literal(after)}"
        self._rules.append(f"text_{len(self._rules)}[suffix={json.dumps(after)}]: /(.|\\n)*/")
        return f"{head} text_{len(self._rules) - 1}"

    def _rule(self, name: str, body: str) -> str:
        name = f"{name}_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _literal(self, text: str) -> str:
        """Return terms for a text: a token for each marker that is a single token, else strings."""
        parts, start = [], 0
        for marker in _MARKER.finditer(text):
            token_id = self._token_id(marker[0])
            if token_id is not None:
                parts += [_quoted(text[start : marker.start()]), f"<[{token_id}]>"]
                start = marker.end()
        return _joined([*parts, _quoted(text[start:])])


def inline_json(schema: Any) -> str:
    """Return a grammar term for JSON that follows a schema."""
    options = {"x-guidance": JSON_OPTIONS}
    value = {**_without_prose(schema), **options} if isinstance(schema, Mapping) else options
    return f"%json {json.dumps(value)}"


def _call_schema(function: ForcedFunction) -> Mapping[str, Any]:
    """Return the JSON schema of a whole call, for models that write a call as a JSON object.

    The whole call is one term of the grammar. If the beginning of a call were a separate term, the
    lexer would read the beginning of every JSON object as this term. So every JSON object would
    have to be a call, and the model could not answer in JSON.
    """
    return {
        "type": "object",
        "properties": {
            "name": {"const": function.name},
            "parameters": embedded(function.schema, "/properties/parameters"),
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _without_prose(value: Any) -> Any:
    """Return a schema without descriptions and titles, which are most of an agent's schema."""
    if isinstance(value, list):
        return [_without_prose(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        name: _without_prose(item)
        for name, item in value.items()
        if name not in ("description", "title") or not isinstance(item, str)
    }


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def _joined(parts: Sequence[str]) -> str:
    return " ".join(part for part in parts if part)
