"""Reads forced calls in plain JSON, for models whose syntax of calls is unknown.

A call is forced if the request requires a call, for example by `tool_choice`.
"""

from typing import Final

from router.parsers.pieces import CallPiece, Piece, Pieces, new_call_id
from router.parsers.reader import OutputReader
from router.parsers.source import Reading, Source
from router.parsers.tool_calls import Calls, ObjectBody, Syntax, Tools

_NO_PIECES: Final[list[Piece]] = []


class ForcedCall:
    """Reads an output that consists of one function's arguments."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def push(self, text: str) -> list[Piece]:
        """Return the arguments as they arrive."""
        if self._has_begun:
            return [CallPiece(0, text)] if text else []
        self._has_begun = True
        return [CallPiece(0, text, new_call_id(), self._name)]

    def flush(self) -> list[Piece]:
        """Return nothing: no text is held back."""
        return _NO_PIECES


def chosen_call(tools: Tools) -> OutputReader:
    """Return the reader of an output that is one object with a function's name and arguments."""
    syntax = Syntax(ObjectBody(), at_start=True)

    def part(source: Source, pieces: Pieces) -> Reading[None]:
        return syntax.read(Calls(source, pieces, tools))

    return OutputReader([part])
