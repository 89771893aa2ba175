"""Decides when tokens go to clients: immediately or, while the router is busy, merged."""

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from router.live.live_request import LiveRequest

_MOST_BUSY: Final = 0.7
"""Share of a processor that the event loop's thread may take before tokens are merged."""
_LONGEST_S: Final = 0.05
"""Limit on the time between two waves while tokens wait, however busy the router is."""
_FEW: Final = 32
"""Up to this many streams are written immediately, because merging would save little."""
_LONGEST_HOLD_S: Final = 0.005
"""Maximum time for which a wave holds the event loop before other callbacks run."""
_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")


class Delivery:
    """Makes requests pass on their events, in waves.

    Writing a token to its client takes ten times as long as receiving it from the scheduler. So
    when writing would fill the processor, the next wave waits, and the tokens that a stream has
    gained since the last wave are written together. A router with spare time passes each step on at
    once. A wave that takes long, as when a thousand requests end in one step, lets other callbacks
    run in between.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop | None = None,
        now: Callable[[], float] = time.monotonic,
        busy_s: Callable[[], float] | None = None,
    ) -> None:
        """`busy_s` returns how long the thread has run or waited for a processor, in seconds."""
        self._loop = loop or asyncio.get_running_loop()
        self._now, self._busy_s = now, busy_s or wanted_s
        self._waiting: dict[LiveRequest, None] = {}  # an ordered set
        self._wave: dict[LiveRequest, None] = {}
        """The rest of a wave that has let other callbacks run."""
        self._timer: asyncio.Handle | None = None
        """Starts the next wave, or the rest of the current one."""
        self._last_at, self._last_busy_s = now(), self._busy_s()
        """When the last wave began, on the event loop's clock and on the clock of `busy_s`."""

    def add(self, changed: Iterable[LiveRequest]) -> None:
        """Flush requests, now or in the next wave."""
        self._waiting.update(dict.fromkeys(changed))
        if self._timer is None:
            self._begin_or_wait()

    def _begin_or_wait(self) -> None:
        if len(self._waiting) <= _FEW:
            self._flush()
            return
        interval_s = min((self._busy_s() - self._last_busy_s) / _MOST_BUSY, _LONGEST_S)
        wait_s = self._last_at + interval_s - self._now()
        if wait_s > 0:
            self._timer = self._loop.call_later(wait_s, self._flush)
        else:
            self._flush()

    def _flush(self) -> None:
        """Begin a wave."""
        self._last_at, self._last_busy_s = self._now(), self._busy_s()
        self._wave, self._waiting = self._waiting, {}
        self._flush_some()

    def _flush_some(self) -> None:
        self._timer = None
        ends_at = self._now() + _LONGEST_HOLD_S
        for live in list(self._wave):
            del self._wave[live]
            live.flush()
            if self._now() >= ends_at and self._wave:
                self._timer = self._loop.call_soon(self._flush_some)
                return
        if self._waiting:
            self._begin_or_wait()


def wanted_s() -> float:
    """Return how many seconds this thread has run or, on Linux, waited for a processor."""
    try:
        ran_ns, waited_ns, _ = _SCHEDSTAT.read_bytes().split()
    except OSError:
        return time.thread_time()
    return (int(ran_ns) + int(waited_ns)) * 1e-9
