"""Keeps copies between device and host in order with a GPU's computation, and counts them.

CUDA events keep the order: computation waits only for the copies that it needs, and the host waits
for a copy only in `await_stores` and `synchronize`.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gpu_worker import metrics


class CopyStreams:
    """Two CUDA streams: one copies blocks to the host (stores), one to the device (loads).

    *Work*, in the methods' docstrings, is what the caller enqueues on the current stream. On this
    stream the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._store = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._load = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stored_staging: torch.cuda.Event | None = None

    def begin_staging(self) -> None:
        """Make later work wait until the copies of the last `storing_staged` have ended.

        So later work may overwrite the memory that these copies read.
        """
        if self._stored_staging is not None:
            torch.cuda.current_stream().wait_event(self._stored_staging)

    @contextmanager
    def storing_staged(self) -> Iterator[None]:
        """Copies in this context start after all earlier work.

        Work waits for these copies only if it is enqueued after a call of `begin_staging`.
        """
        self._store.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._store):
            yield
        self._stored_staging = self._store.record_event()

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Copies in this context start after all earlier work, and all later work waits for them.

        So later work may overwrite the device blocks that are copied.
        """
        computing = torch.cuda.current_stream()
        self._store.wait_stream(computing)
        with torch.cuda.stream(self._store):
            yield
        computing.wait_stream(self._store)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Copies in this context start after all earlier work and all earlier stores.

        Work waits for these copies only if it is enqueued after a call of `end_loading`.
        """
        self._load.wait_stream(torch.cuda.current_stream())
        self._load.wait_stream(self._store)
        with torch.cuda.stream(self._load):
            yield

    def end_loading(self) -> None:
        """Make later work wait for all loads that were enqueued before this call."""
        torch.cuda.current_stream().wait_stream(self._load)

    def await_stores(self) -> None:
        """Block the calling thread until all stores have ended."""
        self._store.synchronize()

    def synchronize(self) -> None:
        """Wait until all copies are done."""
        self._store.synchronize()
        self._load.synchronize()


@dataclass(frozen=True, slots=True, eq=False)
class _UnderWay:
    direction: str
    num_bytes: int
    begin: torch.cuda.Event
    end: torch.cuda.Event


class TransferMeter:
    """Counts bytes and seconds of copies between device and host. Called from one thread.

    CUDA events time a GPU's copies. After a copy has ended, the next call of `measure` or
    `count_ended` counts the copy.
    """

    def __init__(self, *, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._under_way: deque[_UnderWay] = deque()

    @contextmanager
    def measure(self, direction: str, num_bytes: int) -> Iterator[None]:
        """Count the copies that are made, or enqueued on the current stream, in this context."""
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
        """Count the copies that a GPU has finished."""
        waiting = len(self._under_way)
        for _ in range(waiting):  # the two streams may finish out of order
            move = self._under_way.popleft()
            if not move.end.query():  # type: ignore[no-untyped-call]
                self._under_way.append(move)
                continue
            took_s = move.begin.elapsed_time(move.end) / 1000
            metrics.count_transfer("host", move.direction, move.num_bytes, took_s)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
