"""A fake of `cuda.bindings.driver`: its calls for virtual memory, which enforce their rules. A
device has a budget, which the drivers of several processes may share. Its memory is the host's, so
that tensors can view it. Memory that is not mapped, or not zeroed yet, is full of POISON.
"""

import ctypes
import mmap
from enum import Enum
from types import SimpleNamespace

import torch

from gpu_worker.memory.elastic import CudaChunks

GRANULARITY = 4096
POISON = 0xDD


class CUresult(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


OK = CUresult.CUDA_SUCCESS


class Budget:
    """A device's memory."""

    def __init__(self, num_bytes):
        self.num_bytes = num_bytes
        self.used_bytes = 0
        self.most_used_bytes = 0

    def take(self, num_bytes):
        if self.used_bytes + num_bytes > self.num_bytes:
            return False
        self.used_bytes += num_bytes
        self.most_used_bytes = max(self.most_used_bytes, self.used_bytes)
        return True


class FakeCudaDriver:
    """`refuses` names a call that fails once, at its nth time."""

    CUresult = CUresult
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def __init__(self, budget, refuses=None, nth=1):
        self.budget = budget
        self.calls = []
        self.ranges = {}
        """The reserved ranges: address to memory."""
        self.handles = {}
        """Bytes of each handle that was created and not released."""
        self.mapped = {}
        """By address: the mapping's bytes, and whether access is allowed."""
        self._refuses, self._nth = refuses, nth
        self._num_handles = 0

    def CUmemAllocationProp(self):  # noqa: N802
        return SimpleNamespace(location=SimpleNamespace())

    def CUmemAccessDesc(self):  # noqa: N802
        return SimpleNamespace(location=SimpleNamespace())

    def cuMemGetAllocationGranularity(self, place, option):  # noqa: N802
        assert (place.type, place.location.type, place.location.id, option) == (1, 1, 0, 0)
        return self._answer("cuMemGetAllocationGranularity", GRANULARITY)

    def cuMemAddressReserve(self, size, alignment, address, flags):  # noqa: N802
        assert size % GRANULARITY == alignment == address == flags == 0
        memory = mmap.mmap(-1, size)
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        ctypes.memset(at, POISON, size)
        self.ranges[at] = memory
        return self._answer("cuMemAddressReserve", at)

    def cuMemAddressFree(self, address, size):  # noqa: N802
        assert len(self.ranges.pop(address)) == size
        assert not self.mapped, "what is mapped is unmapped first"
        return self._answer("cuMemAddressFree")

    def cuMemCreate(self, size, place, flags):  # noqa: N802
        assert size % GRANULARITY == flags == 0
        assert place.location.id == 0
        refused = self._answer("cuMemCreate", None)
        if refused[0] is not OK:
            return refused
        if not self.budget.take(size):
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        self._num_handles += 1
        self.handles[self._num_handles] = size
        return OK, self._num_handles

    def cuMemMap(self, address, size, offset, handle, flags):  # noqa: N802
        assert offset == flags == 0
        assert self.handles[handle] == size
        assert any(at <= address <= at + len(it) - size for at, it in self.ranges.items())
        assert address not in self.mapped, "a chunk is mapped twice"
        answer = self._answer("cuMemMap")
        if answer[0] is OK:
            self.mapped[address] = size, False
        return answer

    def cuMemRelease(self, handle):  # noqa: N802
        size = self.handles.pop(handle)
        if self.calls[-1] == "cuMemMap refused":
            self.budget.used_bytes -= size  # no mapping keeps it
        return self._answer("cuMemRelease")

    def cuMemSetAccess(self, address, size, access, count):  # noqa: N802
        assert [(each.location.id, each.flags) for each in access] == [(0, 3)] * count
        assert self.mapped[address] == (size, False)
        answer = self._answer("cuMemSetAccess")
        if answer[0] is OK:
            self.mapped[address] = size, True
        return answer

    def cuMemsetD8(self, address, value, size):  # noqa: N802
        assert self.mapped[address] == (size, True), "it is not accessible"
        ctypes.memset(address, value, size)
        return self._answer("cuMemsetD8")

    def cuMemUnmap(self, address, size):  # noqa: N802
        assert self.mapped.pop(address)[0] == size
        ctypes.memset(address, POISON, size)
        self.budget.used_bytes -= size
        return self._answer("cuMemUnmap")

    def _answer(self, name, *values):
        if name == self._refuses:
            self._nth -= 1
            if self._nth == 0:
                self.calls.append(f"{name} refused")
                return CUresult.CUDA_ERROR_INVALID_VALUE, *(None for _ in values)
        self.calls.append(name)
        return OK, *values


class HostChunks(CudaChunks):
    """`CudaChunks` whose tensor is on the fake driver's host memory."""

    def __init__(self, driver, max_bytes, chunk_bytes=2 * GRANULARITY):
        super().__init__(driver, torch.device("cuda", 0), max_bytes, chunk_bytes)

    def view(self):
        return torch.frombuffer(self._driver.ranges[self._address], dtype=torch.uint8)
