"""Starts the block moves of a step, within and between tiers, and collects finished disk moves.

The pools in `kv/` move the bytes; this module determines the order of the moves.
"""

import sys
from typing import Protocol

import numpy as np
import torch

from contract.arrays import Int32Array
from contract.step import Plan
from gpu_worker.kv.disk_pool import NO_ENDED_MOVES, DiskPool, EndedMoves
from gpu_worker.kv.host_pool import HostPool
from gpu_worker.memory.transfer import upload
from gpu_worker.ranks.collectives import Ranks
from gpu_worker.step.block_labels import BlockLabels


class Pool(Protocol):
    """The methods of the device's KV pool that block moves need."""

    def copy(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy whole blocks `src` to `dst`, int64[N] each; all reads come before all writes."""

    def resize(self, num_blocks: int) -> None:
        """Resize to `num_blocks` blocks; raise OutOfMemoryError if there is no room."""

    def close(self) -> None:
        """Free the memory. No other call may follow."""


class BlockMoves:
    """Moves blocks within and between a worker's tiers. Used by one thread.

    Corrects the labels after failed swap-ins, and updates them when disk moves end.
    """

    def __init__(
        self,
        pool: Pool,
        host_pool: HostPool | None,
        disk_pool: DiskPool | None,
        labels: BlockLabels,
        device: torch.device,
        ranks: Ranks | None,
    ) -> None:
        """Without a `host_pool` no step swaps; without a `disk_pool` no step stores or loads.

        `ranks` are the model's other devices, which make the same moves; None: the model has one
        device.
        """
        self.host_pool = host_pool
        self.disk_pool = disk_pool
        self._pool = pool
        self._labels = labels
        self._device = device
        self._ranks = ranks

    def start(self, plan: Plan) -> Int32Array:
        """Start a step's moves; on a GPU they are enqueued before the step's computation.

        Returns:
            int32[F]: device blocks whose swap-in failed.
        """
        failed = self._swap(plan)
        self._labels.fail_swap_ins(plan, failed)
        if len(plan.copy_src_block_ids):
            blocks = (plan.copy_src_block_ids, plan.copy_dst_block_ids)
            src, dst = upload([ids.astype(np.int64) for ids in blocks], self._device)
            self._pool.copy(src, dst)
        return failed

    def take_ended(self, step_id: int) -> EndedMoves:
        """Return the ended disk moves of steps up to `step_id`, and update labels."""
        if self.disk_pool is None:
            return NO_ENDED_MOVES
        ends = self.disk_pool.take_ended(step_id)
        if self.host_pool is not None:
            self.host_pool.accept(ends.loaded)
        self.disk_pool.name(*self._labels.end_stores(ends.stored, ends.failed_stores))
        self._labels.end_loads(ends.loaded, ends.failed_loads)
        return ends

    def distrust(self, disk_blocks: Int32Array | None = None) -> None:
        """Keep the next worker process from using `disk_blocks`; None: all disk blocks."""
        if self.disk_pool is not None and (disk_blocks is None or len(disk_blocks)):
            self.disk_pool.distrust(disk_blocks)

    def finish(self) -> None:
        """Wait until all disk moves in flight have ended, and update the labels."""
        if self.disk_pool is not None:
            self.disk_pool.synchronize()
        self.take_ended(sys.maxsize)

    def forget(self) -> None:
        """Drop the disk moves in flight; afterwards none of them touches a block."""
        if self.disk_pool is not None:
            self.disk_pool.drain()
        self._labels.forget_disk_moves()

    def close(self) -> None:
        """End the disk's threads, then free the pools. No other call may follow."""
        if self.disk_pool is not None:
            self.disk_pool.close()
        if self.host_pool is not None:
            self.host_pool.synchronize()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # launched work may still touch the pool
        self._pool.close()

    def _swap(self, plan: Plan) -> Int32Array:
        if self.host_pool is None:
            return plan.swap_in_dst_block_ids  # empty, because there are no host blocks
        self.host_pool.begin_step()
        if self.disk_pool is not None:
            _move_to_and_from_disk(plan, self.host_pool, self.disk_pool)
        if len(plan.swap_out_src_block_ids):
            self.host_pool.swap_out(plan.swap_out_src_block_ids, plan.swap_out_dst_block_ids)
        dst = plan.swap_in_dst_block_ids
        failed = self.host_pool.swap_in(plan.swap_in_src_block_ids, dst)
        if self._ranks is None or not self.host_pool.has_checksums or not len(dst):
            return failed
        failed_anywhere: Int32Array = dst[self._ranks.any_has(np.isin(dst, failed))]
        return failed_anywhere


def _move_to_and_from_disk(plan: Plan, host_pool: HostPool, disk_pool: DiskPool) -> None:
    """Start the moves between host and disk, before the step's swaps touch host memory."""
    if not len(plan.disk_store_src_block_ids) and not len(plan.disk_load_src_block_ids):
        return
    host_pool.synchronize()  # a GPU may still copy to or from these host blocks
    disk_pool.store(plan.disk_store_src_block_ids, plan.disk_store_dst_block_ids, plan.step_id)
    disk_pool.load(plan.disk_load_src_block_ids, plan.disk_load_dst_block_ids, plan.step_id)
