"""Lets connections parse received bytes one after another, a few ms per turn of the event loop."""

import asyncio
import time
from collections import deque
from typing import Final, Protocol

_TURN_S: Final = 0.005
"""After parsing for this long, the event loop runs its other callbacks."""


class Parser(Protocol):
    """A connection with received bytes."""

    def parse(self) -> bool:
        """Parse some of the received bytes; return whether bytes are left. Raises nothing."""


class ParsingTurns:
    """Lets connections parse in turn, so that many small frames do not hold the event loop.

    In each turn of the event loop, all connections together parse for about `_TURN_S` at most.
    """

    def __init__(self) -> None:
        self._queue: deque[Parser] = deque()
        self._until: float | None = None
        """When parsing ends in this turn of the event loop; None: it has not begun in this turn."""

    def add(self, parser: Parser) -> None:
        """Let a connection parse, now or soon. The connection must not be in the queue already."""
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
