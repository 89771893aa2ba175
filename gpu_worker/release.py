"""Gives memory that nothing holds any more back to the system, and to a device."""

import contextlib
import ctypes
import gc

import torch

from kernels.cpu.weight_memory import WEIGHT_MEMORY


def release_memory() -> None:
    """Find what is garbage, and have the allocators let go of what is free.

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
