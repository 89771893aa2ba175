"""The host tier of KV memory: blocks beside the device's, and the copies between the two.

Symbols: `B` device blocks, `BH` host blocks, `Y` bytes of a block.

On CUDA the copies run on two streams of their own, one for each direction, and the stream that
computes waits for what it must: in its step for swap-outs, whose device blocks it may overwrite,
and one step later for swap-ins. On a CPU they are done when the call returns.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from gpu_worker.step import Int32Array


class HostPool:
    """Host blocks [0, num_blocks), pinned if the device is a GPU. One thread calls everything here.

    Like `KvPool` it knows no owner. Calls take effect in the order made, and between the steps'
    computations: `begin_step` and `swap_out` before what the step computes is launched.
    """

    def __init__(
        self, device_blocks: torch.Tensor, num_blocks: int, *, has_checksums: bool = False
    ) -> None:
        """Allocate it.

        Args:
            device_blocks: uint8[B, Y], contiguous: the memory of the device's blocks.
            num_blocks: Host blocks.
            has_checksums: Whether a swap-in of a block that has changed since its swap-out fails.
        """
        self.num_blocks = num_blocks
        self._device_blocks = device_blocks
        self._host_blocks = torch.zeros(  # [BH, Y]
            num_blocks, device_blocks.shape[1], dtype=torch.uint8, pin_memory=device_blocks.is_cuda
        )
        self._checksums: dict[int, int] | None = {} if has_checksums else None
        self._is_loading = False
        self._streams = _Streams(device_blocks.device) if device_blocks.is_cuda else None

    def begin_step(self) -> None:
        """Let everything from here on see what the steps before have swapped in."""
        if self._streams is not None and self._is_loading:
            self._is_loading = False
            self._streams.end_loading()

    def swap_out(self, src: Int32Array, dst: Int32Array) -> None:
        """Copy device blocks `src` to host blocks `dst`, as computed by the steps before.

        Args:
            src: int32[N] device blocks.
            dst: int32[N] host blocks, parallel to `src`, each at most once.
        """
        if self._streams is None:
            _copy_runs(self._device_blocks, src, self._host_blocks, dst)
        else:
            with self._streams.storing():
                _copy_runs(self._device_blocks, src, self._host_blocks, dst)
        if self._checksums is not None:
            self._await_stores()
            for block in dst.tolist():
                self._checksums[block] = self._checksum(block)

    def swap_in(self, src: Int32Array, dst: Int32Array) -> Int32Array:
        """Copy host blocks `src` to device blocks `dst`; there from the next `begin_step` on.

        Args:
            src: int32[N] host blocks, as swapped out by earlier steps.
            dst: int32[N] device blocks, parallel to `src`, each at most once.

        Returns:
            int32[F]: those of `dst` that were not copied, because their source has changed.
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
        if self._streams is None:
            _copy_runs(self._host_blocks, good_src, self._device_blocks, good_dst)
        else:
            with self._streams.loading():
                _copy_runs(self._host_blocks, good_src, self._device_blocks, good_dst)
        return dst[~is_intact]

    def synchronize(self) -> None:
        """Wait until all copies are done."""
        if self._streams is not None:
            self._streams.store.synchronize()
            self._streams.load.synchronize()

    def _await_stores(self) -> None:
        """Wait until the host's memory holds what was swapped out."""
        if self._streams is not None:
            self._streams.store.synchronize()

    def _checksum(self, block: int) -> int:
        return zlib.crc32(self._host_blocks[block].numpy().data)


class _Streams:
    """The order between computing, storing and loading on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.store = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.load = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Copies made within come after everything launched before, and before all that follows.

        What follows may overwrite the device blocks.
        """
        computing = torch.cuda.current_stream()
        self.store.wait_stream(computing)
        with torch.cuda.stream(self.store):
            yield
        computing.wait_stream(self.store)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Copies made within come after everything launched before, and before `end_loading`.

        So they come after the stores of earlier steps, which computation has waited for.
        """
        self.load.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.load):
            yield

    def end_loading(self) -> None:
        """Let everything launched from here on come after the loads."""
        torch.cuda.current_stream().wait_stream(self.load)


def _copy_runs(
    source: torch.Tensor, src: Int32Array, target: torch.Tensor, dst: Int32Array
) -> None:
    """Copy rows `src` of `source` to rows `dst` of `target`, one copy for each run."""
    for first_src, first_dst, count in runs(src, dst):
        into = target[first_dst : first_dst + count]
        what = source[first_src : first_src + count]
        if into.is_cuda or what.is_cuda:
            into.copy_(what, non_blocking=True)
        else:  # memcpy; torch's own loop is slower on single blocks
            np.copyto(into.numpy(), what.numpy())


def runs(src: Int32Array, dst: Int32Array) -> Iterator[tuple[int, int, int]]:
    """Yield (first source, first target, count) of the longest runs of consecutive pairs.

    Pairs may come in any order: no target is twice, so their order makes no difference.
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
