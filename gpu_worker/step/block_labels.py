"""Labels of the blocks of every tier: content hashes, assigned by the scheduler.

A label describes a block's bytes. It is copied with the bytes, and removed when the bytes are
overwritten, so it stays correct if the scheduler assigned it correctly. A device block with bytes
that are known to be wrong is *void*: it gets no label until a step overwrites it from its first
slot, or a copy replaces it.

No method waits for copies: a copy that a GPU makes later, in stream order, counts as made.
"""

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from contract.arrays import Int32Array, Int64Array, Labels
from contract.hashing import HASH_BYTES, BlockHash
from contract.state import HeldBlocks, Holdings, Pins
from contract.step import Plan
from contract.worker_limits import Limits
from gpu_worker.step.rows import Rows, ScheduledRows


class LabelPins:
    """Stores which labels the scheduler has pinned and until when, for the next scheduler.

    The worker never evicts a block, so pins have no effect in the worker. A pin belongs to a label
    and not to a block, so it stays valid when the block moves. If there are too many pins, the pins
    that expire first are dropped.
    """

    def __init__(self, max_pins: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_pins = max_pins
        """The limit on pins: the number of device blocks. A limit is needed, because the scheduler
        does not tell the worker when it unpins a label."""
        self._clock = clock
        self._ends: dict[BlockHash, float] = {}  # in the order of pinning

    def pin(self, pins: Pins) -> None:
        """Pin each label for its number of seconds, from now."""
        now = self._clock()
        for label, seconds in pins:
            self._ends.pop(label, None)
            self._ends[label] = now + seconds
        if len(self._ends) > self.max_pins:
            by_end = sorted(self._ends, key=self._ends.__getitem__)
            # Dropping an eighth more than needed avoids sorting all pins at each step that pins.
            most = self.max_pins - self.max_pins // 8
            for index, label in enumerate(by_end):
                if len(by_end) - index <= most and self._ends[label] > now:
                    break
                del self._ends[label]

    def held(self) -> Pins:
        """Return the labels that are still pinned, each with its remaining seconds."""
        now = self._clock()
        return tuple((label, end - now) for label, end in self._ends.items() if end > now)

    def clear(self) -> None:
        self._ends.clear()


_T = TypeVar("_T", bound=np.generic)


class TierLabels:
    """The labels of one tier's blocks, and the order in which they were assigned."""

    def __init__(self, num_blocks: int) -> None:
        self._labels = np.zeros((num_blocks, HASH_BYTES), np.uint8)
        self._ages = np.zeros(num_blocks, np.int64)
        """By block: a number that is larger for a newer label. 0: the block has no label."""

    def assign(self, blocks: Int32Array, labels: Labels, ages: Int64Array) -> None:
        """Label blocks; age 0 removes the label. A repeated block gets its last label.

        Args:
            blocks: int32[N].
            labels: uint8[N, 32].
            ages: int64[N].
        """
        self._labels[blocks] = labels
        self._ages[blocks] = ages

    def of(self, blocks: Int32Array) -> tuple[Labels, Int64Array]:
        """Return copies of the labels and ages of int32[N] blocks, as `assign` takes them."""
        return self._labels[blocks], self._ages[blocks]

    def remove(self, blocks: Int32Array | Int64Array) -> None:
        """Remove the labels of int32[N] blocks."""
        self._ages[blocks] = 0

    def remove_equal(self, labels: Labels) -> Int32Array:
        """Remove all labels that equal one of `labels`, uint8[N, 32]; return their blocks."""
        wrong = {label.tobytes() for label in labels}
        named = np.flatnonzero(self._ages)
        is_wrong = [label.tobytes() in wrong for label in self._labels[named]]
        removed = named[np.array(is_wrong, np.bool_)]
        self._ages[removed] = 0
        return removed.astype(np.int32)

    def resize(self, num_blocks: int) -> None:
        """Resize to `num_blocks` blocks; new ones have no label."""
        self._labels = _resized(self._labels, num_blocks)
        self._ages = _resized(self._ages, num_blocks)

    def clear(self) -> None:
        self._ages[:] = 0

    def held(self) -> HeldBlocks:
        """Return the labelled blocks, oldest label first."""
        named = np.flatnonzero(self._ages)
        blocks = named[np.argsort(self._ages[named], kind="stable")].astype(np.int32)
        return HeldBlocks(blocks, self._labels[blocks])


class BlockLabels:
    """The labels of all tiers. For each step, `apply` is called once, after `Rows.apply`."""

    def __init__(self, limits: Limits) -> None:
        self.device = TierLabels(limits.num_blocks)
        self.host = TierLabels(limits.num_host_blocks)
        self.disk = TierLabels(limits.num_disk_blocks)
        self._pins = LabelPins(limits.num_blocks)
        self._block_size = limits.block_size
        self._has_windows = limits.has_windows
        self._is_void = np.zeros(limits.num_blocks, np.bool_)
        self._num_given = 0
        # Disk moves in flight, by target block: a store's labels and ages, a load's source block.
        self._stores: dict[int, tuple[Labels, Int64Array]] = {}
        self._loads: dict[int, int] = {}

    def apply(self, plan: Plan, rows: Rows, scheduled: ScheduledRows) -> None:
        """Assign the plan's labels, then move or remove labels as the step changes the blocks.

        Swap-ins are assumed to succeed; `fail_swap_ins` corrects the labels if some fail.
        """
        self._name(plan.labelled_block_ids, plan.labels)
        self._pins.pin(plan.pins)
        self._begin_disk_moves(plan)
        if len(plan.swap_out_src_block_ids):
            self.host.assign(
                plan.swap_out_dst_block_ids, *self.device.of(plan.swap_out_src_block_ids)
            )
        if len(plan.swap_in_src_block_ids):
            self.device.assign(
                plan.swap_in_dst_block_ids, *self.host.of(plan.swap_in_src_block_ids)
            )
            self._is_void[plan.swap_in_dst_block_ids] = False
        if len(src := plan.copy_src_block_ids):
            self.device.assign(plan.copy_dst_block_ids, *self.device.of(src))
            self._is_void[plan.copy_dst_block_ids] = self._is_void[src]
        self._write(rows, scheduled)

    def holdings(self, rows: Rows) -> Holdings:
        """Make the report for the next scheduler. All steps' results must have arrived."""
        return Holdings(
            rows.held(self.has_void),
            self.device.held(),
            self.host.held(),
            self.disk.held(),
            self._pins.held(),
        )

    def fail_swap_ins(self, plan: Plan, failed: Int32Array) -> None:
        """If a swap-in has failed, remove its host block's label, and make its device block void.

        Args:
            plan: The step that was applied last.
            failed: int32[F], the blocks of `plan.swap_in_dst_block_ids` whose swap-in failed.
        """
        if len(failed):
            has_failed = np.isin(plan.swap_in_dst_block_ids, failed)
            bad = plan.swap_in_src_block_ids[has_failed]
            self._void_stores(self.host.of(bad)[0])
            self.host.remove(bad)
            self._avoid(failed)

    def distrust(self, rows: Rows, failed_rows: Int64Array) -> Int32Array:
        """Remove the labels of failed rows' blocks in every tier, so that their KV is never reused.

        Returns:
            int32[N]: the disk blocks that lost their labels.
        """
        on_disk = [np.empty(0, np.int32)]
        for row in failed_rows.tolist():
            blocks = rows.block_table(row)
            if self._has_windows:
                blocks = blocks[blocks > 0]  # without the null block
            labels, ages = self.device.of(blocks)
            for tier in (self.device, self.host):
                tier.remove_equal(labels[ages > 0])
            on_disk.append(self.disk.remove_equal(labels[ages > 0]))
            self._void_stores(labels[ages > 0])
            self._avoid(blocks)
        return np.concatenate(on_disk)

    def end_stores(self, stored: Int32Array, failed: Int32Array) -> tuple[Int32Array, Labels]:
        """Label the stored disk blocks; blocks whose store failed stay without a label.

        Returns:
            int32[N], the blocks of `stored` that got a label; and uint8[N, 32], the labels.
        """
        for block in stored.tolist():
            self.disk.assign(np.array([block], np.int32), *self._stores.pop(block))
        for block in failed.tolist():
            del self._stores[block]
        labels, ages = self.disk.of(stored)
        return stored[ages > 0], labels[ages > 0]

    def restore_disk(self, blocks: Int32Array, labels: Labels) -> None:
        """Label disk blocks that an earlier process stored; the oldest labels come first.

        Called before the first step.
        """
        self.disk.assign(blocks, labels, 1 + np.arange(len(blocks)))
        self._num_given = max(self._num_given, len(blocks))

    def end_loads(self, loaded: Int32Array, failed: Int32Array) -> None:
        """Label the loaded host blocks; a disk block whose load failed loses its label."""
        for block in loaded.tolist():
            source = np.array([self._loads.pop(block)], np.int32)
            self.host.assign(np.array([block], np.int32), *self.disk.of(source))
        for block in failed.tolist():
            self.disk.remove(np.array([self._loads.pop(block)], np.int32))

    def forget_disk_moves(self) -> None:
        """Forget the disk moves in flight."""
        self._stores.clear()
        self._loads.clear()

    def clear(self) -> None:
        """Remove all labels and pins."""
        for tier in (self.device, self.host, self.disk):
            tier.clear()
        self._is_void[:] = False
        self._pins.clear()
        self.forget_disk_moves()

    def resize_device(self, num_blocks: int) -> None:
        self.device.resize(num_blocks)
        self._pins.max_pins = num_blocks
        self._is_void = _resized(self._is_void, num_blocks)

    def has_void(self, blocks: Int32Array) -> bool:
        return bool(self._is_void[blocks].any())

    def _name(self, blocks: Int32Array, labels: Labels) -> None:
        if not len(blocks):
            return
        ages = self._num_given + 1 + np.arange(len(blocks))
        self._num_given += len(blocks)
        ages[self._is_void[blocks]] = 0
        self.device.assign(blocks, labels, ages)

    def _begin_disk_moves(self, plan: Plan) -> None:
        if not len(plan.disk_store_src_block_ids) and not len(plan.disk_load_src_block_ids):
            return
        for src, dst in _pairs(plan.disk_store_src_block_ids, plan.disk_store_dst_block_ids):
            self._stores[dst] = self.host.of(np.array([src], np.int32))
        self.disk.remove(plan.disk_store_dst_block_ids)
        self._loads.update(
            (dst, src)
            for src, dst in _pairs(plan.disk_load_src_block_ids, plan.disk_load_dst_block_ids)
        )
        self.host.remove(plan.disk_load_dst_block_ids)

    def _write(self, rows: Rows, scheduled: ScheduledRows) -> None:
        """Remove the labels of blocks to which the step writes KV."""
        firsts, offsets = np.divmod(scheduled.starts, self._block_size)  # [S]
        blocks = rows.blocks_of(scheduled.rows, firsts)  # [S * G]
        self.device.remove(blocks)
        self._is_void[blocks[np.repeat(offsets == 0, rows.num_groups)]] = False
        if scheduled.num_decodes == len(scheduled.rows):  # one token each, and one block
            return
        lasts = (scheduled.starts + scheduled.lens - 1) // self._block_size
        for index in np.flatnonzero(lasts > firsts).tolist():
            row, groups = scheduled.rows[index], rows.num_groups
            first, end = (firsts[index] + 1) * groups, (lasts[index] + 1) * groups
            blocks = rows.block_tables[row, first:end]
            self.device.remove(blocks)
            self._is_void[blocks] = False

    def _void_stores(self, labels: Labels) -> None:
        """Cancel the future labels of disk blocks that are being stored, if they are in `labels`.

        `labels` is uint8[N, 32].
        """
        wrong = {label.tobytes() for label in labels}
        for label, age in self._stores.values():
            if label.tobytes() in wrong:
                age[:] = 0

    def _avoid(self, blocks: Int32Array) -> None:
        self.device.remove(blocks)
        self._is_void[blocks] = True


def _resized(values: npt.NDArray[_T], length: int) -> npt.NDArray[_T]:
    """Return the first `length` values, padded with zeros."""
    resized = np.zeros((length, *values.shape[1:]), values.dtype)
    num_kept = min(length, len(values))
    resized[:num_kept] = values[:num_kept]
    return resized


def _pairs(src: Int32Array, dst: Int32Array) -> list[tuple[int, int]]:
    return list(zip(src.tolist(), dst.tolist(), strict=True))
