"""Memory, mapped in chunks, that grows and shrinks at its end while its addresses stay the same.

A range of addresses is reserved once, for the largest size. The mapped chunks are the first
ones of the range. When the memory grows, the next chunks are mapped, and when it shrinks, the last
ones are unmapped. So views, and the pointers in captured graphs, stay valid within the current
size.
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
    """There is no memory for new chunks, or there are no addresses for a range.

    None of the new chunks is mapped. The message has the sizes.
    """


class Chunks(Protocol):
    """A reserved range of addresses, mapped in chunks of one size."""

    chunk_bytes: int

    def map(self, first: int, count: int) -> None:
        """Map chunks [first, first + count), zeroed. None of them may be mapped already.

        Raises:
            OutOfMemoryError: There is no memory; none of the chunks has been mapped.
        """

    def unmap(self, first: int, count: int) -> None:
        """Unmap chunks [first, first + count), which no code may be using. Contents are lost."""

    def view(self) -> torch.Tensor:
        """Return uint8[N] over the whole range, valid until `close`. Chunk 0 must be mapped."""

    def close(self) -> None:
        """Release the range. All chunks must be unmapped."""


class ElasticMemory:
    """Memory whose size can change: the first `num_bytes` of a range. Called from one thread."""

    def __init__(self, chunks: Chunks, num_bytes: int) -> None:
        """Map `num_bytes`, at least 1, zeroed.

        Raises:
            OutOfMemoryError: There is too little memory; the range is released.
        """
        self.num_bytes = num_bytes
        self._chunks = chunks
        try:
            chunks.map(0, self._num_chunks(num_bytes))
        except Exception:
            chunks.close()
            raise
        self.bytes = chunks.view()
        """uint8[N] over the whole range; only the first `num_bytes` may be read or written."""

    def resize(self, num_bytes: int) -> None:
        """Resize to `num_bytes`, at least 1; new bytes are zero.

        On a GPU, all work that uses the removed bytes must have ended.

        Raises:
            OutOfMemoryError: There is too little memory. Nothing has changed.
        """
        before, after = self._num_chunks(self.num_bytes), self._num_chunks(num_bytes)
        if after > before:
            self._chunks.map(before, after - before)
        elif after < before:
            self._chunks.unmap(after, before - after)
        # The last chunk may hold stale bytes past the old end.
        self.bytes[self.num_bytes : min(num_bytes, before * self._chunks.chunk_bytes)] = 0
        self.num_bytes = num_bytes

    def close(self) -> None:
        """Free everything, including the addresses. Views must no longer be used."""
        self._chunks.unmap(0, self._num_chunks(self.num_bytes))
        self._chunks.close()

    def _num_chunks(self, num_bytes: int) -> int:
        return -(-num_bytes // self._chunks.chunk_bytes)


_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""With this flag, reserved addresses do not count as memory in overcommit accounting."""
_HUGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_SMALL: int | None = getattr(mmap, "MADV_NOHUGEPAGE", None)


class CpuChunks:
    """CPU memory: `Chunks` over an anonymous map.

    The pages of an unmapped chunk go back to the system; the chunk then reads as zeros. Callers
    must not write to an unmapped chunk, because writing would allocate pages again.

    The initial chunks, which the first call of `map` maps, get pages when they are first used.
    Chunks mapped later are touched at once, so that other workers do not count the memory of these
    chunks as free.

    Mapped chunks are on huge pages if the system has them. Attention reads blocks from everywhere
    in a KV pool; with small pages, it would spend a tenth of its time on looking up addresses.
    """

    chunk_bytes = mmap.PAGESIZE

    def __init__(self, max_bytes: int, available_bytes: Callable[[], int]) -> None:
        """Reserve addresses for at least `max_bytes`.

        `available_bytes` returns how much memory the process may still take. If new
        chunks need more, `map` raises an OutOfMemoryError. The initial chunks, whose size the
        operator has set, are not checked.

        Raises:
            OutOfMemoryError: The system refuses that many addresses.
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
        self._advise(_SMALL, start, num_bytes)  # otherwise a huge page may cover it again
        self._memory.madvise(mmap.MADV_DONTNEED, start, num_bytes)

    def _advise(self, advice: int | None, start: int, num_bytes: int) -> None:
        """Advise the system about a range, if the system supports the advice."""
        if advice is not None:
            with contextlib.suppress(OSError):
                self._memory.madvise(advice, start, num_bytes)

    def view(self) -> torch.Tensor:
        """See `Chunks`. The tensor keeps the map alive."""
        return torch.from_numpy(np.frombuffer(self._memory, np.uint8))

    def close(self) -> None:
        """Do nothing: the map is freed with the last view of it."""


_CHUNK_BYTES = 32 * 1024**2
"""The smallest chunk. With chunks of this size, mapping a whole GPU's memory takes thousands of
calls; smaller chunks would take more, and no caller needs them."""


class VirtualMemoryError(Exception):
    """The driver is missing, or refused a call for a reason other than lack of memory."""


def load_driver() -> Any:
    """Import `cuda.bindings.driver` of cuda-bindings, which is installed with torch for CUDA.

    Raises:
        VirtualMemoryError: The package is not installed.
    """
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise VirtualMemoryError(
            f"a pool that can be resized needs the package cuda-bindings: {error}"
        ) from error


class CudaChunks:
    """GPU memory: `Chunks` over the driver's calls for virtual memory.

    To map a chunk, the driver creates its memory, maps it, makes it accessible and zeroes it. The
    memory's handle is released at once; the memory stays allocated until the chunk is unmapped. The
    device's context must be current on every calling thread.
    """

    def __init__(
        self, driver: Any, device: torch.device, max_bytes: int, chunk_bytes: int = _CHUNK_BYTES
    ) -> None:
        """Reserve addresses for at least `max_bytes`, in chunks of at least `chunk_bytes`.

        Raises:
            VirtualMemoryError: The device has no virtual memory, or no addresses left.
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
            VirtualMemoryError: The driver refused a call; none of the chunks is mapped.
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
            AcceleratorError: The driver refused a call. Which chunks are mapped is then unknown, so
                the process must end, as after any other device failure.
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
        """Create a chunk's memory; if the device is full, empty torch's cache and try again."""
        for can_wait in (True, False):
            error, handle = self._driver.cuMemCreate(self.chunk_bytes, self._place, 0)
            if error != self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                self._check("cuMemCreate", error)
                return handle
            if can_wait:
                torch.cuda.empty_cache()
        raise OutOfMemoryError(
            f"a chunk needs {self.chunk_bytes} bytes; {self._device} has less left"
        )

    def _at(self, chunk: int) -> int:
        at: int = self._address + chunk * self.chunk_bytes
        return at

    def _call(self, name: str, *args: Any) -> Any:
        """Call a function of the driver; return the first value after its error code, if any."""
        error, *values = getattr(self._driver, name)(*args)
        self._check(name, error)
        return values[0] if values else None

    def _check(self, name: str, error: Any) -> None:
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise VirtualMemoryError(f"{name} of {self._device} failed: {error!r}")
