"""Reads forced calls in plain JSON, for models whose syntax of calls is unknown."""

from typing import Final

from pydantic_core import from_json, to_json

from router.parsers.pieces import CallPiece, Piece, Text, new_call_id

_NO_PIECES: Final[list[Piece]] = []


class ForcedCall:
    """Reads an output that is the arguments of one function."""

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


class ChosenCall:
    """Reads an output that is one object with a function's name and arguments."""

    def __init__(self) -> None:
        self._text = ""

    def push(self, text: str) -> list[Piece]:
        """Wait for the object's end."""
        self._text += text
        return _NO_PIECES

    def flush(self) -> list[Piece]:
        """Read the object; an object that was cut short is text."""
        try:
            call = from_json(self._text)
        except ValueError:
            return [Text(self._text)]
        arguments = to_json(call["arguments"]).decode()
        return [CallPiece(0, arguments, new_call_id(), call["name"])]
