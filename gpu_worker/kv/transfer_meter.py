"""Counts what moves between the device and the host, and how long the copies take."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gpu_worker import metrics


@dataclass(frozen=True, slots=True, eq=False)
class _UnderWay:
    direction: str
    num_bytes: int
    begin: torch.cuda.Event
    end: torch.cuda.Event


class TransferMeter:
    """One thread calls everything here.

    A GPU copies when it gets to it, so its time is read from events, and counted later.
    """

    def __init__(self, *, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._under_way: deque[_UnderWay] = deque()

    @contextmanager
    def measure(self, direction: str, num_bytes: int) -> Iterator[None]:
        """Count copies that are made, or given to the current stream, within."""
        if not self._is_cuda:
            start_s = time.perf_counter()
            yield
            metrics.count_transfer("host", direction, num_bytes, time.perf_counter() - start_s)
            return
        self.count_ended()
        begin, end = _event(), _event()
        begin.record()
        yield
        end.record()
        self._under_way.append(_UnderWay(direction, num_bytes, begin, end))

    def count_ended(self) -> None:
        """Count the copies that a GPU has made by now."""
        waiting = len(self._under_way)
        for _ in range(waiting):  # those of two streams: one may wait behind the other's
            move = self._under_way.popleft()
            if not move.end.query():  # type: ignore[no-untyped-call]
                self._under_way.append(move)
                continue
            took_s = move.begin.elapsed_time(move.end) / 1000
            metrics.count_transfer("host", move.direction, move.num_bytes, took_s)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
