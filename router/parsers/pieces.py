"""The result of parsing an output: pieces of text, thinking and tool calls, in order."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Text:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """A part of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A part of a tool call; the first part has an id and a name."""

    position: int
    """The index of the call in the output."""
    arguments: str
    """The next part of the arguments' JSON."""
    call_id: str | None = None
    name: str | None = None


Piece: TypeAlias = Text | Thought | CallPiece


class Reader(Protocol):
    """Parses one output while the output's text arrives. A user's parser has these methods, too."""

    def push(self, text: str) -> Sequence[Piece]:
        """Read more text and return its pieces; hold text back only while it is ambiguous."""

    def flush(self) -> Sequence[Piece]:
        """At the output's end, return the pieces of the text that was held back."""


class Pieces:
    """Collects an output's pieces until `take` returns them; merges adjacent pieces of one kind."""

    def __init__(self) -> None:
        self.num_calls = 0
        """The number of calls that have begun in this output."""
        self._pieces: list[Piece] = []

    def text(self, text: str) -> None:
        self._add(Text, text)

    def thought(self, text: str) -> None:
        self._add(Thought, text)

    def call(self, name: str, call_id: str) -> None:
        """Begin a call."""
        self._pieces.append(CallPiece(self.num_calls, "", call_id, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Append to the arguments of the latest call."""
        if not text:
            return
        position, last = self.num_calls - 1, self._pieces[-1] if self._pieces else None
        if isinstance(last, CallPiece) and last.position == position:
            self._pieces[-1] = CallPiece(position, last.arguments + text, last.call_id, last.name)
        else:
            self._pieces.append(CallPiece(position, text))

    def extend(self, pieces: Sequence[Piece]) -> None:
        """Add the pieces of another reader."""
        self._pieces += pieces

    def take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _add(self, kind: type[Text] | type[Thought], text: str) -> None:
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, kind):
            self._pieces[-1] = kind(last.text + text)
        else:
            self._pieces.append(kind(text))


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex}"
