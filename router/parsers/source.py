"""Text that arrives in pieces, behind an interface that hides the pieces from parsers.

A parser is a generator that yields whenever it needs more text. Methods that may wait are
generators, too (`yield from`). The results of these methods do not depend on how the text is cut
into pieces, so a parser's results do not depend on the cuts either.

A parser calls `mark` before it reads what may be a tool call. The source keeps the text read since
the mark. If this text turns out not to be a tool call, the parser passes it on as plain text.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

from router.parsers.literals import LiteralText

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
"""A generator that yields whenever it needs more text."""

_SPACE = re.compile(r"\s*")


class MalformedError(Exception):
    """The text breaks the syntax. The parser passes on all text since the mark as plain text."""


class Source:
    """The text of one output, from the mark to the last character that has arrived."""

    def __init__(self) -> None:
        self._text = ""
        """The text from the mark on."""
        self._at = 0
        self._has_ended = False

    def add(self, text: str) -> None:
        self._text += text

    def end(self) -> None:
        """Signal the end of the text; from now on no method waits for more."""
        self._has_ended = True

    def mark(self) -> None:
        self._text = self._text[self._at :]
        self._at = 0

    @property
    def is_over(self) -> bool:
        """Whether the text has ended and all of it was read."""
        return self._has_ended and self._at == len(self._text)

    def take_back(self) -> str:
        """Return the text read since the mark, and set the mark after this text."""
        read = self._text[: self._at]
        self.mark()
        return read

    def rewind(self) -> None:
        """Go back to the mark."""
        self._at = 0

    def take_arrived(self) -> str:
        """Return all text that has arrived after the mark, and set the mark after this text."""
        self._at = len(self._text)
        return self.take_back()

    def wait(self) -> Reading[bool]:
        """Wait for more text; return False if the text has ended."""
        if self._has_ended:
            return False
        yield
        return True

    def peek(self) -> Reading[str]:
        """Return the next character; "" at the end of the text."""
        while self._at == len(self._text):
            if not (yield from self.wait()):
                return ""
        return self._text[self._at]

    def has(self, literal: str) -> Reading[bool]:
        """Read `literal` if it comes next; return whether it was read."""
        while not self._text.startswith(literal, self._at):
            if not literal.startswith(self._text[self._at : self._at + len(literal)]):
                return False
            if not (yield from self.wait()):
                return False
        self._at += len(literal)
        return True

    def has_any(self, literals: Sequence[str]) -> Reading[bool]:
        """Read one of `literals` if one comes next; return whether one was read."""
        for literal in literals:
            if (yield from self.has(literal)):
                return True
        return False

    def expect(self, literal: str) -> Reading[None]:
        """Read `literal`, or its beginning if the text ends there; else raise MalformedError."""
        if (yield from self.has(literal)):
            return
        rest = self._text[self._at :]
        if not self._has_ended or not literal.startswith(rest):
            raise MalformedError
        self._at = len(self._text)

    def skip_space(self) -> Reading[None]:
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None, "the pattern also matches no space"
            self._at = space.end()
            if self._at < len(self._text) or not (yield from self.wait()):
                return

    def word(self, pattern: re.Pattern[str], max_chars: int) -> Reading[str]:
        """Read the characters that match `pattern`, a repeated character class such as [a-z]*.

        Raises:
            MalformedError: No character matches, or more than `max_chars` do.
        """
        while True:
            found = pattern.match(self._text, self._at)
            end = self._at if found is None else found.end()
            if end - self._at > max_chars:
                raise MalformedError
            if end < len(self._text) or not (yield from self.wait()):
                break
        word = self._text[self._at : end]
        if not word:
            raise MalformedError
        self._at = end
        return word

    def until(
        self, literals: Sequence[str], show: Callable[[str], None], *, trims: bool = False
    ) -> Reading[str]:
        """Read up to and including the first of `literals`; pass the text before it to `show`.

        `show` gets the text as it arrives. If `trims` is true, white space before the literal is
        not shown. Text that was read but not shown stays after the mark.

        Returns the literal, or "" if the text ends without a literal. If "" is returned, the text
        that was not shown may be the beginning of a literal.
        """
        self.mark()
        while True:
            text = self._text
            found = [(at, literal) for literal in literals if (at := text.find(literal)) >= 0]
            start, literal = min(found) if found else (_num_certain(text, literals), "")
            shown = text[:start].rstrip() if trims else text[:start]
            show(shown)
            self._text = text[len(shown) :]
            self._at = 0
            if literal:
                self._at = start - len(shown) + len(literal)
                return literal
            if not (yield from self.wait()):
                self._at = len(self._text)
                return ""

    def literal(self, value: LiteralText, show: Callable[[str], None]) -> Reading[None]:
        """Read a JSON or Python literal; pass its JSON to `show` as the literal arrives.

        The mark moves past the text whose JSON was shown.

        Raises:
            MalformedError: The literal is malformed, or the text ends within it.
        """
        while True:
            text, self._at = value.push(self._text, self._at)
            show(text)
            self._text = self._text[self._at - value.num_held :]
            self._at = value.num_held
            if value.is_broken:
                raise MalformedError
            if value.is_done:
                return
            if not (yield from self.wait()):
                if not value.end():
                    show(self.take_back())  # the output was cut short within this literal
                    raise MalformedError
                return

    def held_literal(self, value: LiteralText) -> Reading[str]:
        """Read a JSON or Python literal without moving the mark; return its JSON."""
        shown = []
        while not value.is_done:
            text, self._at = value.push(self._text, self._at)
            shown.append(text)
            if value.is_broken or (
                not value.is_done and not (yield from self.wait()) and not value.end()
            ):
                raise MalformedError
        return "".join(shown)


def _num_certain(text: str, literals: Sequence[str]) -> int:
    """Count the characters before the first position at which one of `literals` may begin."""
    certain = len(text)
    for literal in literals:
        start = max(0, len(text) - len(literal) + 1)
        while (start := text.find(literal[0], start, certain)) >= 0:
            if literal.startswith(text[start:]):
                certain = start
                break
            start += 1
    return certain
