"""Threads for work on text, with a bound on how much of it may be in hand."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from contract.errors import TooBusyError

T = TypeVar("T")


class TextThreads:
    """Runs one kind of work off the event loop, and never behind another kind's."""

    def __init__(self, kind: str, *, num_threads: int, max_pending: int) -> None:
        """At most `max_pending` pieces of work wait or run; `kind` names them in errors."""
        self._kind = kind
        self._max_pending = max_pending
        self._num_pending = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=kind)

    @property
    def num_pending(self) -> int:
        """How many pieces of work wait or run, whether or not anybody waits for them."""
        return self._num_pending

    async def run(self, work: Callable[[], T]) -> T:
        """Gives what `work` gives; if the caller is cancelled, work that has not begun never does.

        Raises `TooBusyError` beyond `max_pending`.
        """
        with self._lock:
            if self._num_pending >= self._max_pending:
                raise TooBusyError(
                    f"{self._num_pending} calls of the kind {self._kind} are in hand; at most"
                    f" {self._max_pending} may be"
                )
            self._num_pending += 1
        try:
            future = self._threads.submit(work)
        except BaseException:
            self._end()
            raise
        # Not when the caller stops waiting: a thread may be at it for long after that.
        future.add_done_callback(self._end)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Ends the threads, each after what it is at."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _end(self, _: "Future[T] | None" = None) -> None:
        with self._lock:
            self._num_pending -= 1
