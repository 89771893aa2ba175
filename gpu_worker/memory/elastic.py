"""Memory that grows and shrinks at its end while its addresses stay: mapped by chunk.

A range of addresses is reserved once, for the most that there may ever be. Behind it memory is
mapped, and given back, chunk by chunk from its beginning. So views, and the pointers that captured
graphs have, are good for as long as what they are used for is within the present size.
"""

import contextlib
import importlib
import mmap
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch


class OutOfMemoryError(Exception):
    """There is no memory for the chunks that were to be mapped; none of them is. Says numbers."""


class Chunks(Protocol):
    """A reserved range of addresses, and what is mapped behind it, in chunks of one size."""

    chunk_bytes: int

    def map(self, first: int, count: int) -> None:
        """Map chunks [first, first + count), none of which is mapped; they are zero.

        Raises:
            OutOfMemoryError: None of them is mapped.
        """

    def unmap(self, first: int, count: int) -> None:
        """Give mapped chunks back. Their contents are lost; nothing may be using them."""

    def view(self) -> torch.Tensor:
        """uint8[N] over the whole range, of which chunk 0 is mapped; good until `close`."""

    def close(self) -> None:
        """Give up the range, of which nothing is mapped."""


class ElasticMemory:
    """The first `num_bytes` of a range. One thread calls everything here."""

    def __init__(self, chunks: Chunks, num_bytes: int) -> None:
        """Map `num_bytes`, at least 1, zeroed.

        Raises:
            OutOfMemoryError: They are not there; the range is given up.
        """
        self.num_bytes = num_bytes
        self._chunks = chunks
        try:
            chunks.map(0, self._num_chunks(num_bytes))
        except Exception:
            chunks.close()
            raise
        self.bytes = chunks.view()
        """uint8[N] over the whole range; behind `num_bytes` there is nothing to read or write."""

    def resize(self, num_bytes: int) -> None:
        """Have `num_bytes`, at least 1; what there is more than before is zero.

        On a GPU the device must have ended all work on what goes.

        Raises:
            OutOfMemoryError: They are not there; it is as before.
        """
        before, after = self._num_chunks(self.num_bytes), self._num_chunks(num_bytes)
        if after > before:
            self._chunks.map(before, after - before)
        elif after < before:
            self._chunks.unmap(after, before - after)
        # The last chunk of before may hold what was beyond the end.
        self.bytes[self.num_bytes : min(num_bytes, before * self._chunks.chunk_bytes)] = 0
        self.num_bytes = num_bytes

    def close(self) -> None:
        """Give all of it back, the addresses too: no view may be used any more."""
        self._chunks.unmap(0, self._num_chunks(self.num_bytes))
        self._chunks.close()

    def _num_chunks(self, num_bytes: int) -> int:
        return -(-num_bytes // self._chunks.chunk_bytes)


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
