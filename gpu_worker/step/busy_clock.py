"""Measures for how long a device computes, without waiting for it."""

import time
from collections import deque

import torch


class BusyClock:
    """Adds up the spans from `begin` to `end` on the device's own clock.

    A span begins when the device comes to it: not before it has done what it was given before. So
    what is missing to the wall clock is time in which it had no step. One thread calls it.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._begun: float | torch.cuda.Event | None = None
        self._spans: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._busy_s = 0.0

    def begin(self) -> None:
        """What is given to the device from here on is of the span; one that has no end is none."""
        self._begun = self._event() if self._is_cuda else time.perf_counter()

    def end(self) -> None:
        """End the span."""
        if isinstance(self._begun, float):
            self._busy_s += time.perf_counter() - self._begun
        elif self._begun is not None:
            self._spans.append((self._begun, self._event()))
        self._begun = None

    def take_s(self) -> float:
        """Seconds of the spans that have ended by now and were not taken before."""
        while self._spans and self._spans[0][1].query():  # type: ignore[no-untyped-call]
            begun, ended = self._spans.popleft()
            self._busy_s += begun.elapsed_time(ended) / 1e3
        taken, self._busy_s = self._busy_s, 0.0
        return taken

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
