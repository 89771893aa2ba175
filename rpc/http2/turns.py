"""Connections parse what they receive in turn, for a few milliseconds of each event loop's turn."""

import asyncio
import time
from collections import deque
from typing import Final, Protocol

_TURN_S: Final = 0.005
"""Then the event loop does all else that is due."""


class Parser(Protocol):
    """A connection that has received something."""

    def parse(self) -> bool:
        """Parse a slice; return whether there is more. It raises nothing."""


class Turns:
    """Whose turn it is: so many small frames do not hold the event loop, of however many clients.

    Without it, each connection would parse for some milliseconds in each turn of the event loop.
    """

    def __init__(self) -> None:
        self._queue: deque[Parser] = deque()
        self._until: float | None = None
        """The end of this turn; None: nothing was parsed in it."""

    def add(self, parser: Parser) -> None:
        """Let a connection parse, now or soon; it must not wait already."""
        is_first = not self._queue
        self._queue.append(parser)
        until = self._begin() if self._until is None else self._until
        if is_first and time.monotonic() < until:
            self._advance(until)

    def _begin(self) -> float:
        self._until = time.monotonic() + _TURN_S
        asyncio.get_running_loop().call_soon(self._end)
        return self._until

    def _end(self) -> None:
        self._until = None
        if self._queue:
            self._advance(self._begin())

    def _advance(self, until: float) -> None:
        queue = self._queue
        while queue:
            parser = queue.popleft()
            if parser.parse():
                queue.append(parser)
            if time.monotonic() >= until:
                break
