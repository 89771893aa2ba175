"""The order between computing, storing to the host and loading from it, on a GPU.

Events keep it: neither the host nor, where it can be helped, what computes waits for the link.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gpu_worker import metrics


class CopyStreams:
    """A stream for stores, one for loads; the caller's current stream is the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._store = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._load = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stored_staging: torch.cuda.Event | None = None

    def begin_staging(self) -> None:
        """Let what is launched from here on come after the last `storing_staged` is done."""
        if self._stored_staging is not None:
            torch.cuda.current_stream().wait_event(self._stored_staging)

    @contextmanager
    def storing_staged(self) -> Iterator[None]:
        """Copies made within come after everything launched before; what follows does not wait."""
        self._store.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._store):
            yield
        self._stored_staging = self._store.record_event()

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Copies made within come after everything launched before, and before all that follows.

        What follows may overwrite the device blocks.
        """
        computing = torch.cuda.current_stream()
        self._store.wait_stream(computing)
        with torch.cuda.stream(self._store):
            yield
        computing.wait_stream(self._store)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Copies made within come after all work and stores before, and before `end_loading`."""
        self._load.wait_stream(torch.cuda.current_stream())
        self._load.wait_stream(self._store)
        with torch.cuda.stream(self._load):
            yield

    def end_loading(self) -> None:
        """Let everything launched from here on come after the loads."""
        torch.cuda.current_stream().wait_stream(self._load)

    def await_stores(self) -> None:
        """Wait until the host's memory holds what was stored."""
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
