"""Finds stop strings in text that arrives in pieces."""

from collections.abc import Iterable


class StopMatcher:
    """Watches the text of one output for the first complete stop string.

    The string that ends first wins; if two end together, the longer one wins. So the result does
    not depend on how the text is cut into pieces.

    For each stop string, the matcher remembers how many characters at the end of the text match the
    string's beginning. The next search begins at the first of these characters and skips
    all earlier text. So the cost is linear in the length of the text.
    """

    def __init__(self, stop: Iterable[str], *, include_in_output: bool) -> None:
        """Make a matcher for the strings `stop`, of which none is empty.

        `include_in_output`: whether the text keeps the stop string that is found.
        """
        self.found: str | None = None
        """The found stop string; once set, no text may be pushed."""
        self._stop = tuple(stop)
        self._num_begun = [0] * len(self._stop)
        self._include_in_output = include_in_output
        self._held = ""

    def push(self, piece: str) -> str:
        """Add a piece of the output's text; return the text that may now be sent.

        The end of the text is held back as long as it matches the beginning of a stop string. After
        a full match the rest of the piece is dropped.
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
            end = at + len(string)  # other matches must end here or earlier
        if self.found is None:
            certain = len(text) - max(self._num_begun)
            self._held = text[certain:]
        else:
            certain = end if self._include_in_output else end - len(self.found)
            self._held = ""
        return text[:certain]

    def flush(self) -> str:
        """At the end of the output, return the text that is still held back; "" after a match."""
        held, self._held = self._held, ""
        return held


def _num_begun(string: str, text: str, start: int) -> int:
    """Return the length of the longest proper prefix of `string` at the end of `text[start:]`."""
    start = max(start, len(text) - len(string) + 1)
    while (start := text.find(string[0], start)) >= 0:
        if string.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
