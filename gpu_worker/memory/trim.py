"""Gives memory that nothing holds any more back to the system, and to a device."""

import contextlib
import ctypes
import gc
from typing import Final

import torch

from kernels.cpu.weight_memory import WEIGHT_MEMORY

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""As malloc.h has them."""
_TRIM_AT_ONCE: Final = 128 * 1024
_MOST_KEPT: Final = 64 * 1024**2
_MOST_NOT_MAPPED: Final = 32 * 1024**2
"""What glibc's own adaptation of the two comes to as large tensors are freed."""


def begin_release() -> None:
    """Let what is freed from here on, until `release_memory`, be the system's at once.

    Each of the allocator's arenas would keep its end, and `malloc_trim` trims but the first one's.
    """
    _set_malloc(_M_TRIM_THRESHOLD, _TRIM_AT_ONCE)


def release_memory() -> None:
    """Free what is garbage, and have the allocators let go of what is free.

    What the process was started with is garbage now, too, though it was left to no collection.
    """
    WEIGHT_MEMORY.begin_region()
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # a system whose C library has none
        ctypes.CDLL(None).malloc_trim(0)
    _set_malloc(_M_TRIM_THRESHOLD, _MOST_KEPT)
    _set_malloc(_M_MMAP_THRESHOLD, _MOST_NOT_MAPPED)


def _set_malloc(parameter: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(parameter, value)
