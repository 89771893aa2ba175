"""What is read in an output's text: pieces of text, of thinking and of calls, in order."""

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
    """Text that the model wrote to think."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a call; its first has an id and a name."""

    position: int
    """Which of the output's calls, from 0."""
    arguments: str
    """The next part of the JSON object's text."""
    call_id: str | None = None
    name: str | None = None


Piece: TypeAlias = Text | Thought | CallPiece


class Reader(Protocol):
    """Reads one output, however it is cut in pieces. A class of one's own has these methods."""

    def push(self, text: str) -> Sequence[Piece]:
        """Read more text; hold back only what is not decided yet."""

    def flush(self) -> Sequence[Piece]:
        """Read what was held back, at the output's end."""


class Pieces:
    """Collects what one push reads; neighbours of a kind become one piece."""

    def __init__(self) -> None:
        self.num_calls = 0
        """Calls begun since the output's start."""
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
        """Add to the arguments of the call begun last."""
        if not text:
            return
        position, last = self.num_calls - 1, self._pieces[-1] if self._pieces else None
        if isinstance(last, CallPiece) and last.position == position:
            self._pieces[-1] = CallPiece(position, last.arguments + text, last.call_id, last.name)
        else:
            self._pieces.append(CallPiece(position, text))

    def extend(self, pieces: Sequence[Piece]) -> None:
        """Add what another reader has read."""
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
