"""Threads for work on text, with a limit on pending work."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from contract.errors import TooBusyError

T = TypeVar("T")


class TextThreads:
    """Runs one kind of work in threads of its own."""

    def __init__(self, kind: str, *, num_threads: int, max_pending: int) -> None:
        """At most `max_pending` tasks wait or run; `kind` names the tasks in errors."""
        self._kind = kind
        self._max_pending = max_pending
        self._num_pending = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=kind)

    @property
    def num_pending(self) -> int:
        """Number of tasks that wait or run, including those whose caller has left."""
        return self._num_pending

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread; it does not start if the caller is cancelled before.

        Raises `TooBusyError` beyond `max_pending`.
        """
        with self._lock:
            if self._num_pending >= self._max_pending:
                raise TooBusyError(
                    f"{self._num_pending} calls of the kind {self._kind} are pending; the limit is"
                    f" {self._max_pending}"
                )
            self._num_pending += 1
        try:
            future = self._threads.submit(work)
        except BaseException:
            self._end()
            raise
        # The task counts until its thread is done, even if the caller stops waiting before.
        future.add_done_callback(self._end)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the threads after their current tasks."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _end(self, _: "Future[T] | None" = None) -> None:
        with self._lock:
            self._num_pending -= 1
