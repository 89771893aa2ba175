"""Memory for packed weights, on huge pages where the system has them.

A step of few tokens reads every weight once, as fast as memory allows. With pages of 4 KiB, a core
spends a third of the step's time on looking up the addresses of pages, and does not prefetch past
the end of a page. Weights are often smaller than a huge page, so several weights share a *region*,
which is allocated and freed as a whole.
"""

import contextlib
import mmap
import threading
from collections.abc import Callable
from typing import Final

import torch

_HUGE_PAGE_BYTES: Final = 2 << 20
_REGION_BYTES: Final = 64 << 20
_ALIGN_BYTES: Final = 64


class _Region:
    """Memory for several tensors, one after another; it is freed when the last of them is freed."""

    def __init__(self, num_bytes: int) -> None:
        num_bytes += _HUGE_PAGE_BYTES  # skip the memory before the first page border
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # the system may have no huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
        everything = torch.frombuffer(pages, dtype=torch.uint8)
        self._memory = everything[-everything.data_ptr() % _HUGE_PAGE_BYTES :]
        self._used_bytes = 0

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """Return unused memory, uint8[num_bytes]; None if too little is left."""
        start = self._used_bytes
        if start + num_bytes > len(self._memory):
            return None
        self._used_bytes += -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        return self._memory[start : start + num_bytes]


class WeightMemory:
    """Copies weights to regions of memory; any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._region: _Region | None = None

    def hold(
        self, weight: torch.Tensor, touch: Callable[[torch.Tensor], None] | None = None
    ) -> torch.Tensor:
        """Return a contiguous copy of a CPU tensor, in memory that is freed with its whole region.

        Before the copy, `touch` is called with the memory, as a tensor of the weight's shape.
        The thread that first writes to a page decides on which memory node the page is, so `touch`
        can place each page near the thread that will read it.
        """
        num_bytes = weight.numel() * weight.itemsize
        with self._lock:
            taken = None if self._region is None else self._region.take(num_bytes)
            if taken is None:
                self._region = _Region(max(_REGION_BYTES, num_bytes))
                taken = self._region.take(num_bytes)
        assert taken is not None, "a new region has room for this weight"
        held = taken.view(weight.dtype).view(weight.shape)
        if touch is not None:
            touch(held)
        return held.copy_(weight)

    def begin_region(self) -> None:
        """Put later weights in a new region, so that they do not keep the old region in memory."""
        with self._lock:
            self._region = None


WEIGHT_MEMORY: Final = WeightMemory()
"""The only `WeightMemory` of the process, so that small weights share pages."""
