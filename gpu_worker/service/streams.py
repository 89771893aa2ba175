"""The open `Execute` streams: each owes its scheduler results, in the order of the batches."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from contract.errors import QuireError
from contract.step import Result
from gpu_worker.service.attachments import Attachment, Attachments

_MAX_OWED = 4
"""Limit on a stream's batches whose results are not sent yet. The limit is above two, the number of
steps that a scheduler may have in flight."""


class ResultStream:
    """A queue of the results that a stream owes, as futures. Used from one event loop."""

    def __init__(self) -> None:
        self._owed: deque[asyncio.Future[Result]] = deque()
        self._room = asyncio.Semaphore(_MAX_OWED)
        self._changed = asyncio.Event()
        self._end: Exception | None = None
        self._is_over = False

    async def wait_for_room(self) -> None:
        """Wait for room for one more result. Call this before each `owe`."""
        await self._room.acquire()

    def owe(self, result: "asyncio.Future[Result]") -> None:
        """Queue one more result to send, or cancel it if the queue has ended."""
        if self._is_over:
            result.cancel()
            return
        self._owed.append(result)
        self._changed.set()

    def end(self, error: Exception | None = None) -> None:
        """End the queue after the results that it holds now; after them, raise `error` if given."""
        if not self._is_over:
            self._is_over, self._end = True, error
            self._changed.set()

    def abandon(self, error: Exception) -> None:
        """End the queue at once: results that are not ready raise `error`."""
        self.end(error)
        for result in self._owed:
            if not result.done():
                result.set_exception(error)

    def close(self) -> None:
        """Discard all results, because nothing reads them any more."""
        self.end()
        for result in self._owed:
            if not result.cancel() and not result.cancelled():
                result.exception()  # retrieved, because asyncio logs unretrieved exceptions
        self._owed.clear()

    async def results(self) -> AsyncIterator[Result]:
        """Yield results in order; raise a step's error, or the error of `end`."""
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


@dataclass(slots=True, eq=False)
class Execution:
    results: ResultStream
    opened_under: Attachment | None
    """The newest attachment when the stream was opened."""
    attachment: Attachment | None = None
    """The attachment of the stream's batches; None before the first batch."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Executions:
    """The open calls of `Execute`. Used from one event loop."""

    def __init__(self) -> None:
        self._open: set[Execution] = set()

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, newest: Attachment | None) -> Execution:
        execution = Execution(ResultStream(), newest)
        if newest is not None:
            newest.num_open_streams = (newest.num_open_streams or 0) + 1
        self._open.add(execution)
        return execution

    def end(self, execution: Execution) -> None:
        if (attachment := execution.opened_under) is not None:
            assert attachment.num_open_streams, "this one is open"
            attachment.num_open_streams -= 1
        execution.results.close()
        self._open.remove(execution)
        execution.ended.set()

    def supersede(self, attachments: Attachments) -> None:
        """End all open streams, because a new attachment has begun; do not wait for results."""
        for execution in self._open:
            execution.results.abandon(attachments.superseded(execution.attachment))

    async def wait_ended(self) -> None:
        """Wait until all streams open now have ended."""
        await asyncio.gather(*(each.ended.wait() for each in tuple(self._open)))

    async def end_all(self, error: QuireError, within_s: float | None = None) -> None:
        """End each stream with `error` after the results that it still owes.

        Streams that are still open after `within_s` seconds end without these results.
        """
        executions = tuple(self._open)
        for execution in executions:
            execution.results.end(error)
        try:
            async with asyncio.timeout(within_s):
                await self.wait_ended()
        except TimeoutError:
            for execution in executions:
                execution.results.abandon(error)
