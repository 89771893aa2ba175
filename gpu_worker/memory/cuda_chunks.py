"""Chunks of a GPU's memory, by the driver's calls for virtual memory.

The driver is `cuda.bindings.driver` of the package cuda-bindings, which torch for CUDA brings
along. Its calls answer (error, values...). A chunk's memory is created, mapped, made accessible and
zeroed; its handle is released at once, since the mapping keeps the memory, so that unmapping it
gives it back.
"""

import importlib
from types import SimpleNamespace
from typing import Any

import torch

from gpu_worker.memory.elastic import OutOfMemoryError

_CHUNK_BYTES = 32 * 1024**2
"""Of a whole GPU that is thousands of calls, not tens of thousands; finer nobody needs it."""


class VirtualMemoryError(Exception):
    """The driver cannot be had, or has refused a call that has nothing to do with room."""


def load_driver() -> Any:
    """Import the driver's calls.

    Raises:
        VirtualMemoryError: They are not installed.
    """
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise VirtualMemoryError(
            f"a pool that can be resized needs the package cuda-bindings: {error}"
        ) from error


class CudaChunks:
    """`elastic_memory.Chunks` of one GPU, whose context is current on every thread that calls."""

    def __init__(
        self, driver: Any, device: torch.device, max_bytes: int, chunk_bytes: int = _CHUNK_BYTES
    ) -> None:
        """Reserve addresses for at least `max_bytes`; a chunk has at least `chunk_bytes`.

        Raises:
            VirtualMemoryError: The device has no virtual memory, or no addresses.
        """
        self._driver = driver
        self._device = device
        self._place = driver.CUmemAllocationProp()
        self._place.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._place.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._place.location.id = device.index
        self._access = driver.CUmemAccessDesc()
        self._access.location.type = self._place.location.type
        self._access.location.id = device.index
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = self._call("cuMemGetAllocationGranularity", self._place, minimum)
        self.chunk_bytes = -(-chunk_bytes // granularity) * granularity
        self._num_bytes = -(-max_bytes // self.chunk_bytes) * self.chunk_bytes
        self._address = int(self._call("cuMemAddressReserve", self._num_bytes, 0, 0, 0))

    def map(self, first: int, count: int) -> None:
        """See `Chunks`.

        Raises:
            VirtualMemoryError: The driver refuses; none of them is mapped either.
        """
        mapped = first
        try:
            while mapped < first + count:
                self._map(mapped)
                mapped += 1
        except (OutOfMemoryError, VirtualMemoryError):
            if mapped > first:
                self.unmap(first, mapped - first)
            raise

    def unmap(self, first: int, count: int) -> None:
        """See `Chunks`.

        Raises:
            AcceleratorError: The driver refuses. What is mapped now nobody knows, so the process
                is of no more use than after any other failure of the device.
        """
        try:
            for chunk in reversed(range(first, first + count)):
                self._call("cuMemUnmap", self._at(chunk), self.chunk_bytes)
        except VirtualMemoryError as error:
            raise torch.AcceleratorError(str(error)) from error

    def view(self) -> torch.Tensor:
        """See `Chunks`."""
        array = {
            "shape": (self._num_bytes,),
            "typestr": "|u1",
            "data": (self._address, False),
            "version": 3,
        }
        return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=array), device=self._device)

    def close(self) -> None:
        """See `Chunks`."""
        self._call("cuMemAddressFree", self._address, self._num_bytes)

    def _map(self, chunk: int) -> None:
        address = self._at(chunk)
        handle = self._create()
        try:
            self._call("cuMemMap", address, self.chunk_bytes, 0, handle, 0)
        finally:
            self._call("cuMemRelease", handle)
        try:
            self._call("cuMemSetAccess", address, self.chunk_bytes, [self._access], 1)
            self._call("cuMemsetD8", address, 0, self.chunk_bytes)
        except VirtualMemoryError:
            self._call("cuMemUnmap", address, self.chunk_bytes)
            raise

    def _create(self) -> Any:
        """Create a chunk's memory; if there is none, of what torch keeps for itself."""
        for can_wait in (True, False):
            error, handle = self._driver.cuMemCreate(self.chunk_bytes, self._place, 0)
            if error != self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                self._check("cuMemCreate", error)
                return handle
            if can_wait:
                torch.cuda.empty_cache()
        raise OutOfMemoryError(
            f"a chunk of {self.chunk_bytes} bytes is needed; {self._device} has no such room left"
        )

    def _at(self, chunk: int) -> int:
        at: int = self._address + chunk * self.chunk_bytes
        return at

    def _call(self, name: str, *args: Any) -> Any:
        """Make a call of the driver's; its first value, if it has any."""
        error, *values = getattr(self._driver, name)(*args)
        self._check(name, error)
        return values[0] if values else None

    def _check(self, name: str, error: Any) -> None:
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise VirtualMemoryError(f"{name} of {self._device} failed: {error!r}")
