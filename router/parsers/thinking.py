"""Parses the thinking before an answer."""

from dataclasses import dataclass

from router.parsers.pieces import Pieces
from router.parsers.source import Reading, Source


@dataclass(frozen=True, slots=True)
class Thinking:
    """The markers around thinking."""

    begin: str
    end: str
    other_ends: tuple[str, ...] = ()
    """Markers of calls, which also end thinking but are not part of it."""

    def has_begun(self, prompt: str, continued: str = "") -> bool:
        """Whether a prompt ends within thinking.

        The marker that begins thinking comes from the template, or from `continued`, the
        assistant's message at the prompt's end.
        """
        if continued:
            return continued.rfind(self.begin) > continued.rfind(self.end)
        return prompt.rstrip().endswith(self.begin)

    def read(self, source: Source, pieces: Pieces, *, has_begun: bool) -> Reading[None]:
        """Read thinking, if there is any, and drop the white space around it."""
        source.mark()
        yield from source.skip_space()
        # A model may repeat a marker with which the prompt ends.
        if not (yield from source.has(self.begin)) and not has_begun:
            source.rewind()
            return
        yield from source.skip_space()
        found = yield from source.until((self.end, *self.other_ends), pieces.thought, trims=True)
        if not found:
            pieces.thought(source.take_back().rstrip())
        elif found != self.end:
            source.rewind()
        yield from source.skip_space()
        source.mark()
