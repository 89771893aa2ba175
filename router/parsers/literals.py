"""Converts a JSON or Python literal to JSON without white space, while the literal arrives.

The returned text is always the beginning of a valid JSON text, because reading stops before the
first character that breaks the syntax. Characters whose JSON depends on later characters, such as a
Python escape, are held back until the later characters arrive.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

MAX_DEPTH: Final = 100
"""Maximum depth of nesting. A deeper literal counts as broken, because a client's parser may
be unable to read it."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The syntax of literals."""

    quotes: str
    words: Mapping[str, str]
    """Maps words that are values, such as true, to JSON."""
    escapes: Mapping[str, str]
    """Maps the character after a backslash to the JSON of the whole escape."""
    has_byte_escapes: bool
    """Whether escapes are Python's: \\x41 is an escape, and an unknown escape, such as \\d, stands
    for itself."""


_JSON_ESCAPES = {character: "\\" + character for character in '"\\/bfnrt'}
JSON: Final = Dialect('"', {"true": "true", "false": "false", "null": "null"}, _JSON_ESCAPES, False)
PYTHON: Final = Dialect(
    "\"'",
    # Models write JSON's words, too.
    {"True": "true", "False": "false", "None": "null", **JSON.words},
    {**{character: "\\" + character for character in '"\\bfnrt'}, "'": "'", "\n": ""},
    True,
)

_PLAIN: Final = {q: re.compile(rf"[^{q}\"\\\x00-\x1f]+") for q in "\"'"}
_SPACE: Final = " \t\n\r"
_CLOSER: Final = {"{": "}", "[": "]"}
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_NUMBER: Final[Mapping[str, Mapping[str, str]]] = {
    # state -> character class -> next state; a number may end in the states of _NUMBER_ENDS
    "": {"-": "-", "0": "0", "d": "d"},
    "-": {"0": "0", "d": "d"},
    "0": {".": ".", "e": "e"},
    "d": {"0": "d", "d": "d", ".": ".", "e": "e"},
    ".": {"0": "f", "d": "f"},
    "f": {"0": "f", "d": "f", "e": "e"},
    "e": {"0": "x", "d": "x", "-": "s", "+": "s"},
    "s": {"0": "x", "d": "x"},
    "x": {"0": "x", "d": "x"},
}
_NUMBER_ENDS: Final = frozenset("0dfx")
_CLASS: Final = {**dict.fromkeys("123456789", "d"), "E": "e"}


class LiteralText:
    """Converts one literal to JSON. Call `push` until `is_done` or `is_broken` is true."""

    def __init__(self, dialect: Dialect = JSON) -> None:
        self.is_done = False
        self.is_broken = False
        self._dialect = dialect
        self._closers: list[str] = []
        self._wants = "value"
        """What may come next, if no scalar is being read: "value", "value or end", "key",
        "key or end", "colon" or "comma"."""
        self._within = ""
        """The scalar that is being read: a string's quote, "number" or "word"; empty: no scalar."""
        self._number = ""
        self._held = ""
        """What has been read of an escape or a word that is not complete yet."""

    @property
    def num_held(self) -> int:
        """The number of characters that `push` has read, but whose JSON it has not returned yet."""
        return len(self._held)

    def push(self, text: str, at: int) -> tuple[str, int]:
        """Read `text` from index `at`; return the new JSON, and the index where reading stopped."""
        shown: list[str] = []
        while at < len(text) and not self.is_done and not self.is_broken:
            if self._within == "number":
                at = self._push_number(text, at, shown)
            elif self._within == "word":
                at = self._push_word(text, at, shown)
            elif self._within:
                at = self._push_string(text, at, shown)
            else:
                at = self._push_structure(text, at, shown)
        return "".join(shown), at

    def end(self) -> bool:
        """Signal the end of the text; return whether the literal is complete.

        Only `end` completes a number at the end of the text, because more digits could have
        followed.
        """
        if self._within == "number" and self._number in _NUMBER_ENDS:
            self._end_value()
        return self.is_done

    def _push_structure(self, text: str, at: int, shown: list[str]) -> int:
        character, wants = text[at], self._wants
        if character in _SPACE:
            return at + 1
        may_end = wants.endswith("end") or wants == "comma"
        if may_end and self._closers and character == self._closers[-1]:
            self._closers.pop()
            shown.append(character)
            self._end_value()
            return at + 1
        if wants == "comma" and character == ",":
            self._wants = "key" if self._closers[-1] == "}" else "value"
        elif wants == "colon" and character == ":":
            self._wants = "value"
        elif wants.startswith(("key", "value")) and character in self._dialect.quotes:
            self._within = character
            character = '"'
        elif not wants.startswith("value"):
            self.is_broken = True
            return at
        elif character in _CLOSER and len(self._closers) < MAX_DEPTH:
            self._closers.append(_CLOSER[character])
            self._wants = "key or end" if character == "{" else "value or end"
        elif character == "-" or (character.isascii() and character.isdecimal()):
            self._within, self._number = "number", ""
            return at
        elif any(word.startswith(character) for word in self._dialect.words):
            self._within = "word"
            return at
        else:
            self.is_broken = True
            return at
        shown.append(character)
        return at + 1

    def _push_string(self, text: str, at: int, shown: list[str]) -> int:
        if self._held:
            return self._push_escape(text, at, shown)
        if plain := _PLAIN[self._within].match(text, at):
            shown.append(plain[0])
            return plain.end()
        character = text[at]
        if character == "\\":
            self._held = character
        elif character == self._within:
            shown.append('"')
            self._end_value()
        else:  # models write line ends and tabs without escapes
            shown.append(json.dumps(character)[1:-1])
        return at + 1

    def _push_escape(self, text: str, at: int, shown: list[str]) -> int:
        character, dialect = text[at], self._dialect
        if len(self._held) == 1:
            if character in dialect.escapes:
                shown.append(dialect.escapes[character])
                self._held = ""
            elif character == "u" or (character == "x" and dialect.has_byte_escapes):
                self._held += character
            elif dialect.has_byte_escapes:
                shown.append("\\\\")
                self._held = ""
                return at
            else:
                self.is_broken = True
                return at
        elif character not in _HEX:
            self.is_broken = True
            return at
        else:
            self._held += character
            num_digits = 4 if self._held[1] == "u" else 2
            if len(self._held) == 2 + num_digits:
                shown.append(f"\\u{self._held[2:]:0>4}")
                self._held = ""
        return at + 1

    def _push_number(self, text: str, at: int, shown: list[str]) -> int:
        character = text[at]
        state = _NUMBER[self._number].get(_CLASS.get(character, character))
        if state is not None:
            self._number = state
            shown.append(character)
            return at + 1
        if self._number in _NUMBER_ENDS:
            self._end_value()
        else:
            self.is_broken = True
        return at

    def _push_word(self, text: str, at: int, shown: list[str]) -> int:
        word = self._held + text[at]
        if word in self._dialect.words:
            shown.append(self._dialect.words[word])
            self._held = ""
            self._end_value()
        elif any(known.startswith(word) for known in self._dialect.words):
            self._held = word
        else:
            self.is_broken = True
            return at
        return at + 1

    def _end_value(self) -> None:
        """Update the state after a key, a scalar, an object or a list."""
        is_key = self._within != "" and self._wants.startswith("key")
        self._within = ""
        if is_key:
            self._wants = "colon"
        elif self._closers:
            self._wants = "comma"
        else:
            self.is_done = True
