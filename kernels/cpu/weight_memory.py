"""Memory for packed weights, on huge pages where the system has them.

A step of few rows reads every weight once, as fast as memory gives it: with pages of 4 KiB a core
spends a third of that time on finding out where the next page is, and does not fetch ahead past its
end. Weights are often smaller than a huge page, so several share a region.
"""

import contextlib
import mmap
import threading
from typing import Final

import torch

_HUGE_PAGE_BYTES: Final = 2 << 20
_REGION_BYTES: Final = 64 << 20
_ALIGN_BYTES: Final = 64


class _Region:
    """Memory that is handed out from its beginning; it lives as long as one tensor of it."""

    def __init__(self, num_bytes: int) -> None:
        """Untouched, it takes no memory."""
        num_bytes += _HUGE_PAGE_BYTES  # of which what lies before the first border is skipped
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel that has none
                pages.madvise(mmap.MADV_HUGEPAGE)
        everything = torch.frombuffer(pages, dtype=torch.uint8)
        self._memory = everything[-everything.data_ptr() % _HUGE_PAGE_BYTES :]
        self._used_bytes = 0

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """uint8[num_bytes] that nobody else has; None: so much is not left."""
        start = self._used_bytes
        if start + num_bytes > len(self._memory):
            return None
        self._used_bytes += -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        return self._memory[start : start + num_bytes]


class WeightMemory:
    """Where weights are copied to, to stay there; any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._region: _Region | None = None

    def hold(self, weight: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of a tensor of the CPU; what it takes is free when its region is."""
        num_bytes = weight.numel() * weight.itemsize
        with self._lock:
            taken = None if self._region is None else self._region.take(num_bytes)
            if taken is None:
                self._region = _Region(max(_REGION_BYTES, num_bytes))
                taken = self._region.take(num_bytes)
        assert taken is not None, "a new region has room for what it is made for"
        return taken.view(weight.dtype).view(weight.shape).copy_(weight)

    def begin_region(self) -> None:
        """Let go of the last region: it is free with what it holds, which will be gone."""
        with self._lock:
            self._region = None


WEIGHT_MEMORY: Final = WeightMemory()
"""One for the process, so that small weights share pages."""
