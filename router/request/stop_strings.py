"""Finds stop strings in a text that arrives in pieces."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopPattern:
    """A stop string, prepared for the search of Knuth, Morris and Pratt.

    Shared by all outputs of a request. What a search knows of the text behind it is one number, how
    many characters of the string match at its end, so that a text is searched in time linear in its
    length whatever its pieces are.
    """

    string: str
    borders: "array[int]"
    """`borders[i]` is the length of the longest proper prefix of `string[:i + 1]` that ends it."""

    @classmethod
    def of(cls, string: str) -> "StopPattern":
        """Prepares a string, which must not be empty."""
        borders = array("I", [0])
        matched = 0
        for character in string[1:]:
            while matched and string[matched] != character:
                matched = borders[matched - 1]
            matched += string[matched] == character
            borders.append(matched)
        return cls(string, borders)

    def search(self, matched: int, text: str, end: int) -> tuple[int, int | None]:
        """Goes on through `text[:end]`, with `matched` characters matching before it.

        Returns how many match at the end and None, or, where the string is first complete, its
        length and the index just past it.
        """
        string, borders = self.string, self.borders
        position = 0
        while position < end:
            if matched == 0:  # most text has no part in a stop string: leap over it
                position = text.find(string[0], position, end)
                if position < 0:
                    return 0, None
            character = text[position]
            while matched and string[matched] != character:
                matched = borders[matched - 1]
            matched += string[matched] == character
            position += 1
            if matched == len(string):
                return matched, position
        return matched, None


class StopMatcher:
    """Watches the text of one output for the first stop string to be complete.

    What ends earliest wins, and of two that end together the longer, so that the result does not
    depend on how the text is cut into pieces.
    """

    def __init__(self, patterns: Iterable[StopPattern], *, include_in_output: bool) -> None:
        """`include_in_output`: whether the stop string is part of the text."""
        self.found: str | None = None
        """The stop string that was found; once set, nothing may be pushed."""
        self._patterns = tuple(patterns)
        self._matched = [0] * len(self._patterns)
        self._include_in_output = include_in_output
        self._held = ""

    def push(self, text: str) -> str:
        """Takes the next piece; returns the text that is certain not to belong to a stop string.

        Held back is the longest end of the text that a stop string begins with. After a find the
        rest of the piece is dropped.
        """
        if not self._patterns:
            return text
        end = len(text)
        for i, pattern in enumerate(self._patterns):
            self._matched[i], match_end = pattern.search(self._matched[i], text, end)
            if match_end is None:
                continue
            if self.found is None or match_end < end or len(pattern.string) > len(self.found):
                self.found = pattern.string
            end = match_end  # from here on only what ends no later counts
        if self.found is None:
            certain = len(self._held) + len(text) - max(self._matched)
        else:
            certain = len(self._held) + end
            if not self._include_in_output:
                certain -= len(self.found)
        text = self._held + text
        self._held = "" if self.found is not None else text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """The text held back, when the output ended otherwise; "" after a find."""
        held, self._held = self._held, ""
        return held
