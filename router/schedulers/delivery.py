"""Decides when tokens go to clients: immediately or, while the router is busy, merged."""

import asyncio
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from typing import Final

from router.live.live_request import LiveRequest

_MOST_BUSY: Final = 0.7
"""Share of a processor that the event loop's thread may take before tokens are merged."""
_LONGEST_S: Final = 0.05
"""Maximum time for which tokens wait, however busy the router is."""
_FEW: Final = 32
"""If a wave has at most this many streams, it never waits, because merging would save little."""
_LONGEST_HOLD_S: Final = 0.005
"""Maximum time for which writing to clients holds the event loop before other callbacks run."""
_SCHEDSTAT: Final = "/proc/self/task/{}/schedstat"
_MOST_BYTES: Final = 100
"""How many bytes to read from `_SCHEDSTAT`; its three 64-bit numbers need fewer."""


class Delivery:
    """Writes tokens to clients in waves; a wave flushes all requests that have new events.

    Writing a token to its client takes ten times as long as receiving it from the scheduler. So
    when writing would take nearly all of the processor's time, the next wave waits, and then writes
    all new tokens of a stream together. A router with spare time writes the tokens of each step
    immediately. If a wave takes long, for example because a thousand requests end in one step, it
    pauses every few milliseconds so that the event loop can run other callbacks.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop | None = None,
        now: Callable[[], float] = time.monotonic,
        busy_s: Callable[[], float] | None = None,
    ) -> None:
        """`busy_s` returns how many seconds the loop's thread has run or waited for a processor."""
        self._loop = loop or asyncio.get_running_loop()
        self._now, self._busy_s = now, busy_s or wanted_s
        self._waiting: list[LiveRequest] = []
        """The requests of the next wave, each once. `is_waiting` of these requests is True."""
        self._wave: deque[LiveRequest] = deque()
        """The requests that the current wave has not flushed yet."""
        self._timer: asyncio.Handle | None = None
        """Starts the next wave, or the rest of the current one."""
        self._last_at, self._last_busy_s = now(), self._busy_s()
        """When the last wave began, on the clock of `now` and on the clock of `busy_s`."""
        self._gives_way_at = self._last_at
        self._is_begun = False
        """Whether `begin` has begun a wave. If so, the next `add` flushes the requests at once."""

    def begin(self, num_streams: int) -> float:
        """Begin a wave for a step with events of `num_streams` streams, unless the wave must wait.

        Returns a time on the clock of `now`. Until that time the caller may flush each request
        right after `LiveRequest.push_token`, while the request's objects are in the processor's
        caches. If the wave must wait, the time is -inf, so the caller may flush no request. In
        both cases the caller then calls `add` with all requests that it has not flushed.
        """
        if self._timer is not None or self._wait_s(num_streams) > 0:
            return -math.inf
        self._is_begun = True
        self._start()
        return self._gives_way_at

    def add(self, changed: Iterable[LiveRequest]) -> None:
        """Put requests into the next wave. The wave starts at once, unless it must wait."""
        for live in changed:
            if not live.is_waiting:
                live.is_waiting = True
                self._waiting.append(live)
        is_begun, self._is_begun = self._is_begun, False
        if self._timer is not None:
            return
        if is_begun:
            self._flush()
        else:
            self._begin_or_wait()

    def _begin_or_wait(self) -> None:
        if (wait_s := self._wait_s(len(self._waiting))) > 0:
            self._timer = self._loop.call_later(wait_s, self._begin)
        else:
            self._begin()

    def _wait_s(self, num_streams: int) -> float:
        """Return how long the next wave must wait, if it has events of `num_streams` streams."""
        if num_streams <= _FEW:
            return 0.0
        interval_s = min((self._busy_s() - self._last_busy_s) / _MOST_BUSY, _LONGEST_S)
        return self._last_at + interval_s - self._now()

    def _start(self) -> None:
        self._last_at, self._last_busy_s = self._now(), self._busy_s()
        self._gives_way_at = self._last_at + _LONGEST_HOLD_S

    def _begin(self) -> None:
        """Begin a wave."""
        self._timer = None
        self._start()
        self._flush()

    def _go_on(self) -> None:
        """Flush the rest of a wave that has let other callbacks run."""
        self._timer = None
        self._gives_way_at = self._now() + _LONGEST_HOLD_S
        self._flush_wave()

    def _flush(self) -> None:
        self._wave, self._waiting = deque(self._waiting), []
        self._flush_wave()

    def _flush_wave(self) -> None:
        while self._wave:
            live = self._wave.popleft()
            live.is_waiting = False
            live.flush()
            if self._now() >= self._gives_way_at and self._wave:
                self._timer = self._loop.call_soon(self._go_on)
                return
        if self._waiting:
            self._begin_or_wait()


def wanted_s() -> float:
    """Return how much processor time this thread has used, in seconds.

    On Linux, the result includes the time in which the thread could run but waited for a processor.
    """
    try:
        file = _opened(_SCHEDSTAT.format(threading.get_native_id()))
        ran_ns, waited_ns, _ = os.pread(file, _MOST_BYTES, 0).split()
    except OSError:
        return time.thread_time()
    return (int(ran_ns) + int(waited_ns)) * 1e-9


@cache
def _opened(path: str) -> int:
    """Open a file only once, and keep it open: opening takes longer than reading."""
    return os.open(path, os.O_RDONLY)
