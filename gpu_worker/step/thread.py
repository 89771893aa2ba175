"""A thread that does one thing after another, and never keeps the process from ending."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class DaemonThread:
    """What is submitted is done in order. One that hangs is left behind when the process ends.

    A `ThreadPoolExecutor` would be waited for, however long a device hangs.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(
        self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> "Future[_T]":
        """Do this after all that was submitted before; the future has what comes of it."""
        future: Future[_T] = Future()

        def job() -> None:
            _settle(future, lambda: function(*args, **kwargs))

        self._jobs.put(job)
        return future

    def stop(self) -> None:
        """End the thread when it has done all; nothing may be submitted afterwards."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _settle(future: "Future[Any]", function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001 - it is the caller's who waits
        future.set_exception(error)
