"""Finds stop strings in a text that arrives in pieces."""

from collections.abc import Iterable


class StopMatcher:
    """Watches the text of one output for the first complete stop string.

    The string that ends first wins, and of two that end together the longer, so that the result
    does not depend on how the text is cut into pieces.

    For each stop string it remembers how many characters at the end of the text begin it. Only from
    there on is the next piece searched, so the cost is linear in the length of the text.
    """

    def __init__(self, stop: Iterable[str], *, include_in_output: bool) -> None:
        """`stop`: not empty each; `include_in_output`: whether the stop string is shown."""
        self.found: str | None = None
        """The stop string that was found; once set, nothing may be pushed."""
        self._stop = tuple(stop)
        self._num_begun = [0] * len(self._stop)
        self._include_in_output = include_in_output
        self._held = ""

    def push(self, piece: str) -> str:
        """Take the next piece; return the text that is certain not to belong to a stop string.

        The longest end of the text that begins a stop string is held back. After a match the rest
        of the piece is dropped.
        """
        if not self._stop:
            return piece
        text = self._held + piece
        end = len(text)
        for i, string in enumerate(self._stop):
            start = len(self._held) - self._num_begun[i]
            at = text.find(string, start, end)
            if at < 0:
                self._num_begun[i] = _num_begun(string, text, start)
                continue
            if self.found is None or at + len(string) < end or len(string) > len(self.found):
                self.found = string
            end = at + len(string)  # a later match must not end behind this one
        if self.found is None:
            certain = len(text) - max(self._num_begun)
            self._held = text[certain:]
        else:
            certain = end if self._include_in_output else end - len(self.found)
            self._held = ""
        return text[:certain]

    def flush(self) -> str:
        """Return the text held back, when the output ended otherwise; "" after a match."""
        held, self._held = self._held, ""
        return held


def _num_begun(string: str, text: str, start: int) -> int:
    """Return how many characters at the end of `text[start:]` begin `string`, but not all of it."""
    start = max(start, len(text) - len(string) + 1)
    while (start := text.find(string[0], start)) >= 0:
        if string.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
