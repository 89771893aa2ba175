"""Returns freed memory to the system and to the device."""

import gc
from typing import Final

import torch

from kernels.cpu.weight_memory import WEIGHT_MEMORY
from rpc.malloc import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, set_malloc, trim_malloc

_TRIM_AT_ONCE: Final = 128 * 1024
_MOST_KEPT: Final = 64 * 1024**2
_MAX_HEAP_BYTES: Final = 32 * 1024**2
"""`release_memory` sets `M_TRIM_THRESHOLD` to `_MOST_KEPT`, and `M_MMAP_THRESHOLD` to
`_MAX_HEAP_BYTES`. By default glibc itself raises the two thresholds when large tensors are freed,
at most to these values. But once a program has set one of them, glibc raises neither."""


def begin_release() -> None:
    """Make malloc return freed memory to the system at once, until `release_memory` is called.

    Otherwise each malloc arena would keep the free memory at its end. To call `malloc_trim` later
    is not enough, because it trims the end of the first arena only.
    """
    set_malloc(M_TRIM_THRESHOLD, _TRIM_AT_ONCE)


def release_memory() -> None:
    """Collect garbage, then make the allocators release their free memory.

    Objects that `gc.freeze` exempted when the worker started may be garbage now, so these objects
    are collected, too.
    """
    WEIGHT_MEMORY.begin_region()
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim_malloc()
    set_malloc(M_TRIM_THRESHOLD, _MOST_KEPT)
    set_malloc(M_MMAP_THRESHOLD, _MAX_HEAP_BYTES)
