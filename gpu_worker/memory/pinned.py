"""Host memory that a GPU reads and writes by itself.

Mapped and registered here, since torch's own allocator for it rounds up to a power of two: of 5 GiB
it would take 8.
"""

import mmap
import weakref
from typing import Protocol

import numpy as np
import structlog
import torch

_log = structlog.get_logger()


class HostRegistry(Protocol):
    """What of CUDA's runtime is called; each returns 0, or the number of an error."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's
        """Pin memory."""

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's
        """Let it go."""


def pinned_bytes(num_bytes: int, registry: HostRegistry) -> torch.Tensor:
    """Zeroed uint8[num_bytes], at least one; let go with the last tensor that views its memory.

    Where it cannot be registered a warning says so, and it is torch's.
    """
    memory = mmap.mmap(-1, num_bytes)
    array = np.frombuffer(memory, np.uint8)
    address: int = array.ctypes.data
    if error := int(registry.cudaHostRegister(address, num_bytes, 0)):
        _log.warning("host memory is pinned by torch: cudaHostRegister failed", error=error)
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    # The tensors hold the array, and the finalizer the map: it is unmapped after that was called.
    weakref.finalize(array, _let_go, registry, address, memory).atexit = False
    return torch.from_numpy(array)


def _let_go(registry: HostRegistry, address: int, _memory: mmap.mmap) -> None:
    registry.cudaHostUnregister(address)
