"""Chunks of a CPU's memory: the system gives a page when it is touched, and takes it when told.

What a pool begins with is touched as it is used. What it grows by is touched at once, so that it is
the pool's: others that ask later what is left must not count it.
"""

import contextlib
import mmap
import sys
from collections.abc import Callable

import numpy as np
import torch

from gpu_worker.memory.elastic import OutOfMemoryError

_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""The range is not memory: a system that counts what it has promised need not count it."""
_HUGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_SMALL: int | None = getattr(mmap, "MADV_NOHUGEPAGE", None)


class CpuChunks:
    """`elastic_memory.Chunks` over an anonymous map.

    A chunk that is unmapped holds zeros: its pages are the system's again. To write to one would
    take them anew, which nothing here can prevent.

    What is mapped is on huge pages where the system has them: attention reads blocks from all over
    the pool, and finding out where small pages are takes a tenth of its time.
    """

    chunk_bytes = mmap.PAGESIZE

    def __init__(self, max_bytes: int, available_bytes: Callable[[], int]) -> None:
        """Reserve addresses for at least `max_bytes`.

        `available_bytes` says what the process may still take: more is not mapped, but for the
        chunks that come first, which are what the operator asked for.

        Raises:
            OutOfMemoryError: The system does not let the process have as many addresses.
        """
        self._available_bytes = available_bytes
        num_bytes = -(-max_bytes // self.chunk_bytes) * self.chunk_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            self._memory = mmap.mmap(-1, num_bytes, flags=flags)
        except OSError as error:
            raise OutOfMemoryError(
                f"{num_bytes} bytes of addresses cannot be reserved: {error.strerror}"
            ) from error

    def map(self, first: int, count: int) -> None:
        """See `Chunks`."""
        num_bytes = count * self.chunk_bytes
        if not first:
            self._advise(_HUGE, 0, num_bytes)
            return
        if num_bytes > (available := self._available_bytes()):
            raise OutOfMemoryError(
                f"{num_bytes} bytes more are needed; the machine has {available} left"
            )
        self._advise(_HUGE, first * self.chunk_bytes, num_bytes)
        np.frombuffer(self._memory, np.uint8, num_bytes, first * self.chunk_bytes).fill(0)

    def unmap(self, first: int, count: int) -> None:
        """See `Chunks`."""
        start, num_bytes = first * self.chunk_bytes, count * self.chunk_bytes
        self._advise(_SMALL, start, num_bytes)  # or the system might join these to one that is used
        self._memory.madvise(mmap.MADV_DONTNEED, start, num_bytes)

    def _advise(self, advice: int | None, start: int, num_bytes: int) -> None:
        """Say which pages suit a range; a system need not know any."""
        if advice is not None:
            with contextlib.suppress(OSError):
                self._memory.madvise(advice, start, num_bytes)

    def view(self) -> torch.Tensor:
        """See `Chunks`; the tensor keeps the map."""
        return torch.from_numpy(np.frombuffer(self._memory, np.uint8))

    def close(self) -> None:
        """Leave the map to the last view of it."""
