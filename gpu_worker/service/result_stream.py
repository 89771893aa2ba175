"""What one `Execute` stream owes its scheduler: results in the order of the batches."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from contract.step import Result

_MAX_OWED = 4
"""Batches taken before their results are sent; a scheduler sends two ahead."""


class ResultStream:
    """A queue of futures with an end. Used from one event loop."""

    def __init__(self) -> None:
        self._owed: deque[asyncio.Future[Result]] = deque()
        self._room = asyncio.Semaphore(_MAX_OWED)
        self._changed = asyncio.Event()
        self._end: Exception | None = None
        self._is_over = False

    async def wait_for_room(self) -> None:
        """Wait until fewer results are owed than may be; before each `owe`."""
        await self._room.acquire()

    def owe(self, result: "asyncio.Future[Result]") -> None:
        """Take one more result to send; one that comes after the end is nobody's."""
        if self._is_over:
            result.cancel()
            return
        self._owed.append(result)
        self._changed.set()

    def end(self, error: Exception | None = None) -> None:
        """Owe nothing more: after the results owed so far comes the end, or `error`."""
        if not self._is_over:
            self._is_over, self._end = True, error
            self._changed.set()

    def abandon(self, error: Exception) -> None:
        """End at once: `error` comes in place of the first result that is not there yet."""
        self.end(error)
        for result in self._owed:
            if not result.done():
                result.set_exception(error)

    def close(self) -> None:
        """Nobody reads any more."""
        self.end()
        for result in self._owed:
            if not result.cancel() and not result.cancelled():
                result.exception()  # else asyncio complains that nobody looked at it
        self._owed.clear()

    async def results(self) -> AsyncIterator[Result]:
        """The results in order, as they come; raises what a step raised, or the end."""
        while True:
            while not self._owed and not self._is_over:
                self._changed.clear()
                await self._changed.wait()
            if self._owed:
                output = await self._owed[0]
                self._owed.popleft()
                self._room.release()
                yield output
            elif self._end is not None:
                raise self._end
            else:
                return
