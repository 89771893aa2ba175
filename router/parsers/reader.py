"""Parses one output: first thinking, then text and calls."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from router.parsers.pieces import Piece, Pieces, Reader, Text
from router.parsers.source import Reading, Source

Part: TypeAlias = Callable[[Source, Pieces], Reading[None]]
"""A function that parses a part of an output. `OutputReader` calls several of these functions in
turn; the last of them reads to the output's end."""

_SLICE_CHARS = 1024
"""How many characters are searched for markers at a time."""


class OutputReader:
    """Reads an output with one generator after another, each of which reads a part."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._source, self._pieces = Source(), Pieces()
        self._reading = self._read(parts)

    def push(self, text: str) -> list[Piece]:
        """Read more text; return the pieces that are certain now.

        Text is held back only while its pieces depend on the text that follows. For example, text
        may be the beginning of a marker.
        """
        # Add the text in slices, because a search for the next marker scans all unread text.
        for start in range(0, len(text), _SLICE_CHARS):
            self._source.add(text[start : start + _SLICE_CHARS])
            next(self._reading, None)
        return self._pieces.take()

    def flush(self) -> list[Piece]:
        """At the output's end, return the pieces of the text that was held back."""
        self._source.end()
        next(self._reading, None)
        return self._pieces.take()

    def _read(self, parts: Sequence[Part]) -> Reading[None]:
        for part in parts:
            yield from part(self._source, self._pieces)


class TwoReaders:
    """Parses an output with one reader, and that reader's text pieces with another reader."""

    def __init__(self, first: Reader, second: Reader) -> None:
        self._first, self._second = first, second

    def push(self, text: str) -> list[Piece]:
        return self._read(self._first.push(text))

    def flush(self) -> list[Piece]:
        return [*self._read(self._first.flush()), *self._second.flush()]

    def _read(self, pieces: Sequence[Piece]) -> list[Piece]:
        read: list[Piece] = []
        for piece in pieces:
            read += self._second.push(piece.text) if isinstance(piece, Text) else [piece]
        return read


def plain_text(source: Source, pieces: Pieces) -> Reading[None]:
    """Read text without looking for markers."""
    while True:
        pieces.text(source.take_arrived())
        if not (yield from source.wait()):
            return


def read_by(reader: Reader) -> Part:
    """Return a `Part` that reads the rest of the output with `reader`."""

    def part(source: Source, pieces: Pieces) -> Reading[None]:
        while True:
            pieces.extend(reader.push(source.take_arrived()))
            if not (yield from source.wait()):
                pieces.extend(reader.flush())
                return

    return part
