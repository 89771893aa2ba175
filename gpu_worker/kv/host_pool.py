"""The host tier of KV memory: blocks in host memory, and copies between host and device.

Symbols: `B` device blocks, `BH` host blocks, `Y` bytes of a block, `E` bytes of a block on the
host: Y, or fewer with a codec.

On CUDA the copies run on two separate streams, one per direction (`copy_streams.py`). Later
computation may overwrite blocks that are being swapped out. So the computing stream first gathers
these blocks in a staging area, and the copies to the host read the staging area. If the blocks do
not fit in the staging area, or a codec encodes them, the computing stream waits for the copies
instead. A step's swap-ins run beside the step's computation, and the computation of the next step
waits for the swap-ins.

On a CPU all copies are done when a call returns.
"""

import mmap
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Protocol

import numpy as np
import numpy.typing as npt
import structlog
import torch
from isal import isal_zlib

from contract.arrays import Int32Array
from gpu_worker import metrics
from gpu_worker.kv.codecs.quantized import QuantizedCodec
from gpu_worker.kv.copy_streams import CopyStreams, TransferMeter
from gpu_worker.memory.transfer import upload
from kernels import ops

_log = structlog.get_logger()


class HostRegistry(Protocol):
    """The CUDA runtime's calls that pin memory; each returns 0 or an error number."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's
        ...

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's
        ...


def pinned_bytes(num_bytes: int, registry: HostRegistry) -> torch.Tensor:
    """Allocate uint8[num_bytes], zeroed and pinned; `num_bytes` must be at least 1.

    The memory is unpinned and freed when no tensor views it any more. Torch's own allocator for
    pinned memory rounds up to a power of two, such as 5 GiB to 8 GiB. So this function uses torch's
    allocator only if CUDA cannot register the memory, and then logs a warning.
    """
    memory = mmap.mmap(-1, num_bytes)
    array = np.frombuffer(memory, np.uint8)
    address: int = array.ctypes.data
    if error := int(registry.cudaHostRegister(address, num_bytes, 0)):
        _log.warning("host memory is pinned by torch: cudaHostRegister failed", error=error)
        _forget_error()
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    # The tensors keep the array alive, and the finalizer keeps the map alive, so the map is
    # unmapped after it is unregistered.
    weakref.finalize(array, _unpin, registry, address, memory).atexit = False
    return torch.from_numpy(array)


def _forget_error() -> None:
    """Clear the error that a failed call of CUDA's runtime leaves behind.

    Torch raises this error once, when it launches the next kernel. So launch a kernel here, and
    ignore the error. Otherwise the first step would raise the error.
    """
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _unpin(registry: HostRegistry, address: int, _memory: mmap.mmap) -> None:
    registry.cudaHostUnregister(address)


_CODED_BYTES = {"cuda": 16 * 1024**2, "cpu": 1024**2}
"""How many bytes of blocks a codec encodes or decodes at once, by type of device. The codec's
workspace is several times this size; on a CPU the workspace should fit in the caches."""
STAGING_BYTES = 64 * 1024**2
"""Size of the staging area on a GPU. A copy of this size to the host takes about a
millisecond."""


class HostPool:
    """Host blocks [0, num_blocks), pinned if the device is a GPU. Called from one thread.

    The scheduler allocates the blocks; the pool does not know which sequences use them. Calls take
    effect in order, between the computations of steps. Call `begin_step` and `swap_out` before the
    step's computation is enqueued.
    """

    def __init__(
        self,
        device_blocks: torch.Tensor,
        num_blocks: int,
        *,
        codec: QuantizedCodec | None = None,
        has_checksums: bool = False,
        streams: CopyStreams | None = None,
    ) -> None:
        """Allocate the host memory.

        Args:
            device_blocks: uint8[B, Y], contiguous: the memory of the device blocks.
            num_blocks: Number of host blocks.
            codec: How blocks are encoded; None: bit for bit as on the device.
            has_checksums: Whether a swap-in fails if the host block has changed since its swap-out.
            streams: The streams that copies run on; None: new streams if the device is a GPU.
        """
        self.num_blocks = num_blocks
        self._codec = codec
        self._device_blocks = device_blocks
        block_bytes = device_blocks.shape[1]
        self._max_coded = max(1, _CODED_BYTES[device_blocks.device.type] // block_bytes)
        record_bytes = block_bytes if codec is None else codec.record_bytes
        if device_blocks.is_cuda and num_blocks:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            pinned = pinned_bytes(num_blocks * record_bytes, runtime)
            self._host_blocks = pinned.view(num_blocks, record_bytes)  # [BH, E]
        else:
            self._host_blocks = torch.zeros(num_blocks, record_bytes, dtype=torch.uint8)
        self._streams = streams
        if streams is None and device_blocks.is_cuda:
            self._streams = CopyStreams(device_blocks.device)
        self._staging: torch.Tensor | None = None  # [*, Y]
        if self._streams is not None and codec is None:
            num_staged = min(num_blocks, STAGING_BYTES // block_bytes)
            self._staging = device_blocks.new_empty(num_staged, block_bytes)
        self._checksums: dict[int, int] | None = {} if has_checksums else None
        self._is_loading = False
        self._meter = TransferMeter(is_cuda=device_blocks.is_cuda)

    @property
    def blocks(self) -> npt.NDArray[np.uint8]:
        """uint8[BH, E]: a view for the disk tier. Call `synchronize` before each use."""
        blocks: npt.NDArray[np.uint8] = self._host_blocks.numpy()
        return blocks

    @property
    def has_checksums(self) -> bool:
        return self._checksums is not None

    def begin_step(self) -> None:
        """Make all computation that is enqueued from now on wait for earlier swap-ins."""
        if self._streams is not None and self._is_loading:
            self._is_loading = False
            self._streams.end_loading()
        self._meter.count_ended()

    def swap_out(self, src: Int32Array, dst: Int32Array) -> None:
        """Copy device blocks `src` to host blocks `dst`.

        Kernels that are launched after this call may overwrite the device blocks.

        Args:
            src: int32[N] device blocks.
            dst: int32[N] distinct host blocks, parallel to `src`.
        """
        if self._staging is not None and len(src) <= len(self._staging):
            self._store_staged(src, dst, self._staging[: len(src)])
        else:
            with self._storing(), self._meter.measure("out", self._held_bytes(src)):
                if self._codec is None:
                    _copy_runs(self._device_blocks, src, self._host_blocks, dst)
                else:
                    self._encode(self._codec, src, dst)
        self.accept(dst)

    def swap_in(self, src: Int32Array, dst: Int32Array) -> Int32Array:
        """Copy host blocks `src` to device blocks `dst`.

        Steps may read the device blocks after the next `begin_step`.

        Args:
            src: int32[N] host blocks that `swap_out` has filled in earlier steps, or that were
                passed to `accept`.
            dst: int32[N] distinct device blocks, parallel to `src`.

        Returns:
            int32[F]: the blocks of `dst` that were not filled, because their host blocks have
                changed.
        """
        if not len(src):
            return dst
        self._is_loading = True
        is_intact = np.ones(len(src), np.bool_)
        if self._checksums is not None:
            self._await_stores()
            for i, block in enumerate(src.tolist()):
                is_intact[i] = self._checksums.get(block) == self._checksum(block)
        good_src, good_dst = src[is_intact], dst[is_intact]
        with self._loading(), self._meter.measure("in", self._held_bytes(good_src)):
            if self._codec is None:
                _copy_runs(self._host_blocks, good_src, self._device_blocks, good_dst)
            else:
                self._decode(self._codec, good_src, good_dst)
        return dst[~is_intact]

    def accept(self, blocks: Int32Array) -> None:
        """Store the checksums of int32[N] host blocks; called when the blocks have been filled."""
        if self._checksums is not None:
            self._await_stores()
            for block in blocks.tolist():
                self._checksums[block] = self._checksum(block)

    def read(self, block_ids: Int32Array) -> bytes | None:
        """Return the contents of int32[N] host blocks; None if a block's checksum is wrong."""
        if not self._are_intact(block_ids):
            return None
        return self._host_blocks.numpy()[block_ids].tobytes()

    def checksum(self, block_ids: Int32Array) -> int | None:
        """Return the CRC-32 of what `read` returns, without a copy; None if `read` returns None."""
        if not self._are_intact(block_ids):
            return None
        checksum = 0
        blocks = self._host_blocks.numpy()
        for block in block_ids.tolist():
            checksum = isal_zlib.crc32(blocks[block], checksum)
        return checksum

    def write(self, block_ids: Int32Array, content: bytes | npt.NDArray[np.uint8]) -> None:
        """Fill int32[N] distinct host blocks with contents that `read` returned."""
        self.synchronize()
        blocks = self._host_blocks.numpy()
        blocks[block_ids] = np.frombuffer(content, np.uint8).reshape(len(block_ids), -1)
        self.accept(block_ids)

    def _are_intact(self, block_ids: Int32Array) -> bool:
        self.synchronize()
        return self._checksums is None or all(
            self._checksums.get(block) == self._checksum(block) for block in block_ids.tolist()
        )

    def synchronize(self) -> None:
        if self._streams is not None:
            self._streams.synchronize()

    def _store_staged(self, src: Int32Array, dst: Int32Array, staging: torch.Tensor) -> None:
        """Gather blocks `src` in `staging`; copy them to the host while the device computes."""
        assert self._streams is not None, "only called with a staging area"
        self._streams.begin_staging()
        order = np.argsort(dst)  # in this order only gaps between host blocks break runs
        ops.gather_blocks(self._device_blocks, self._on_device(src[order]), staging)
        with (
            self._streams.storing_staged(),
            self._meter.measure("out", self._held_bytes(dst)),
        ):
            numbers = np.arange(len(dst), dtype=np.int32)
            _copy_runs(staging, numbers, self._host_blocks, dst[order])

    def _encode(self, codec: QuantizedCodec, src: Int32Array, dst: Int32Array) -> None:
        start_s = time.perf_counter()
        for first in range(0, len(src), self._max_coded):
            part = slice(first, first + self._max_coded)
            encoded = codec.encode(self._device_blocks[self._on_device(src[part])])
            numbers = np.arange(len(encoded), dtype=np.int32)
            _copy_runs(encoded, numbers, self._host_blocks, dst[part])
        self._count(codec, "encode", len(src), start_s)

    def _decode(self, codec: QuantizedCodec, src: Int32Array, dst: Int32Array) -> None:
        start_s = time.perf_counter()
        for first in range(0, len(src), self._max_coded):
            part = slice(first, first + self._max_coded)
            numbers = np.arange(len(src[part]), dtype=np.int32)
            encoded = torch.empty(  # [len(numbers), E]
                len(numbers),
                codec.record_bytes,
                dtype=torch.uint8,
                device=self._device_blocks.device,
            )
            _copy_runs(self._host_blocks, src[part], encoded, numbers)
            self._device_blocks[self._on_device(dst[part])] = codec.decode(encoded)
        self._count(codec, "decode", len(src), start_s)

    def _count(
        self, codec: QuantizedCodec, direction: str, num_blocks: int, start_s: float
    ) -> None:
        seconds = time.perf_counter() - start_s if self._streams is None else 0.0
        sizes = (num_blocks * self._device_blocks.shape[1], num_blocks * codec.record_bytes)
        metrics.count_coded("host", codec.name, direction, *sizes, seconds)

    def _on_device(self, blocks: Int32Array) -> torch.Tensor:
        (on_device,) = upload([blocks.astype(np.int64)], self._device_blocks.device)
        return on_device

    def _held_bytes(self, blocks: Int32Array) -> int:
        return len(blocks) * self._host_blocks.shape[1]

    def _storing(self) -> AbstractContextManager[None]:
        return nullcontext() if self._streams is None else self._streams.storing()

    def _loading(self) -> AbstractContextManager[None]:
        return nullcontext() if self._streams is None else self._streams.loading()

    def _await_stores(self) -> None:
        """Wait until all swapped-out blocks are in host memory."""
        if self._streams is not None:
            self._streams.await_stores()

    def _checksum(self, block: int) -> int:
        return isal_zlib.crc32(self._host_blocks[block].numpy())  # 6 times as fast as zlib


def _copy_runs(
    source: torch.Tensor, src: Int32Array, target: torch.Tensor, dst: Int32Array
) -> None:
    """Copy `source[src]` to `target[dst]`, one copy per run that `runs` yields."""
    if source.is_cuda or target.is_cuda:
        for first_src, first_dst, count in runs(src, dst):
            what = source[first_src : first_src + count]
            target[first_dst : first_dst + count].copy_(what, non_blocking=True)
        return
    # Numpy, because torch's overhead per copy is as large as the copy of a small block.
    sources, targets = source.numpy(), target.numpy()
    for first_src, first_dst, count in runs(src, dst):
        into = targets[first_dst : first_dst + count]
        np.copyto(into, sources[first_src : first_src + count])


def runs(src: Int32Array, dst: Int32Array) -> Iterator[tuple[int, int, int]]:
    """Yield runs that cover all pairs of `src` and `dst`, as few as possible, in order of `src`.

    From pair to pair of a run, both numbers increase by 1. A run is (first of `src`, first of
    `dst`, number of pairs). The numbers in `dst` are distinct, so runs may be copied in any order.
    """
    if not len(src):
        return
    order = np.argsort(src, kind="stable")
    src, dst = src[order], dst[order]
    breaks = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    starts = np.concatenate([[0], breaks])
    counts = np.diff(np.append(starts, len(src)))
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        yield int(src[start]), int(dst[start]), count
