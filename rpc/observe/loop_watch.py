"""Detects stalls of an event loop: how long they last, and the stack of the loop's thread.

A separate thread posts a callback to the loop a few times per second, and measures how late the
callback runs. This lag counts from the time at which the post was due, because code that holds the
GIL also delays the post.
"""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

_STILL_S: Final = 5.0
"""A stall that exceeds the threshold by this many seconds is reported even before it ends."""
_MAX_FRAMES: Final = 16


@dataclass(frozen=True, slots=True)
class Stall:
    """A time in which the event loop did not run."""

    lasted_s: float
    """Duration of the stall; if it is not over, the duration so far."""
    cpu_s: float
    """CPU time of the loop's thread during the stall: about 0 if the thread waited, the process was
    suspended, or other processes had the CPU."""
    stack: str
    """The stack of the loop's thread when the stall was noticed, innermost call last."""
    is_over: bool


def watching_loop(
    stall_s: float,
    on_stall: Callable[[Stall], None],
    on_lag: Callable[[float], None] = lambda _: None,
) -> AbstractContextManager[object]:
    """Watch the running event loop inside a `with` block; does nothing if `stall_s` is 0.

    `on_lag` gets every lag in seconds, and `on_stall` gets each stall of `stall_s` or more. Both
    functions run in the watching thread.
    """
    return _LoopWatch(stall_s, on_stall, on_lag) if stall_s else nullcontext()


class _LoopWatch:
    def __init__(
        self, stall_s: float, on_stall: Callable[[Stall], None], on_lag: Callable[[float], None]
    ) -> None:
        self._stall_s = stall_s
        self._on_stall = on_stall
        self._on_lag = on_lag
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._stopping = threading.Event()
        self._ran = threading.Event()
        self._ran_at = 0.0
        self._thread = threading.Thread(target=self._watch, name="loop-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopping.set()
        self._beat()  # the posted callback cannot run while we wait here
        self._thread.join()

    def _beat(self) -> None:
        self._ran_at = time.monotonic()
        self._ran.set()

    def _watch(self) -> None:
        while True:
            cpu_before_s = self._cpu_s()
            due_at = time.monotonic() + self._stall_s / 2
            if self._stopping.wait(self._stall_s / 2):
                return
            self._ran.clear()
            if self._stopping.is_set():  # the loop may wait for this thread and run no callback
                return
            self._loop.call_soon_threadsafe(self._beat)
            if not self._ran.wait(due_at + self._stall_s - time.monotonic()):
                stack = _stack(self._loop_thread)
                if not self._ran.wait(_STILL_S):
                    self._report(due_at, time.monotonic(), cpu_before_s, stack, is_over=False)
                    self._ran.wait()
                self._report(due_at, self._ran_at, cpu_before_s, stack, is_over=True)
            self._on_lag(self._ran_at - due_at)

    def _report(
        self, due_at: float, until: float, cpu_before_s: float, stack: str, *, is_over: bool
    ) -> None:
        lasted_s = until - due_at
        cpu_s = min(lasted_s, self._cpu_s() - cpu_before_s)
        self._on_stall(Stall(lasted_s, cpu_s, stack, is_over))

    def _cpu_s(self) -> float:
        return time.clock_gettime(time.pthread_getcpuclockid(self._loop_thread))


def _stack(thread_id: int) -> str:
    frame = sys._current_frames().get(thread_id)  # noqa: SLF001 - Python documents this function
    return "".join(traceback.format_stack(frame, _MAX_FRAMES)).rstrip() if frame else ""
