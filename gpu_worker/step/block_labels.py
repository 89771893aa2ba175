"""Labels of the blocks of every tier: what the scheduler has named, followed wherever it moves.

A label is a fact about a block's bytes. It is copied where they are copied and removed when they
are written, so no label can be wrong if the scheduler named the block rightly once. A device block
whose bytes are known to be wrong is *void*: it takes no label until it is overwritten from its
first slot, or copied over.

Nothing here waits: what a GPU will copy later, in stream order, counts as copied.
"""

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from contract.arrays import Int32Array, Int64Array, Labels
from contract.hashing import HASH_BYTES, BlockHash
from contract.limits import Limits
from contract.state import HeldBlocks, Holdings, Pins
from contract.step import Plan
from gpu_worker.step.rows import Rows, ScheduledRows


class LabelPins:
    """Which labels the scheduler keeps, and until when: to be told to the next scheduler.

    A worker never evicts, so a pin has no effect here. It belongs to a label, not to a block: it
    holds wherever a block with that label is. When there are too many, those that end first are
    dropped.
    """

    def __init__(self, max_pins: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_pins = max_pins
        """As many as there are blocks. The scheduler does not report unpinning."""
        self._clock = clock
        self._ends: dict[BlockHash, float] = {}  # in the order of pinning

    def pin(self, pins: Pins) -> None:
        """Keep each label for so many seconds from now."""
        now = self._clock()
        for label, seconds in pins:
            self._ends.pop(label, None)
            self._ends[label] = now + seconds
        if len(self._ends) > self.max_pins:
            by_end = sorted(self._ends, key=self._ends.__getitem__)
            # Drops an eighth more than needed, or every step that pins would sort them all.
            most = self.max_pins - self.max_pins // 8
            for index, label in enumerate(by_end):
                if len(by_end) - index <= most and self._ends[label] > now:
                    break
                del self._ends[label]

    def held(self) -> Pins:
        """Labels whose time is not over, and how many seconds are left."""
        now = self._clock()
        return tuple((label, end - now) for label, end in self._ends.items() if end > now)

    def clear(self) -> None:
        self._ends.clear()


_T = TypeVar("_T", bound=np.generic)


class TierLabels:
    """The labels of one tier's blocks, and the order in which they were given."""

    def __init__(self, num_blocks: int) -> None:
        self._labels = np.zeros((num_blocks, HASH_BYTES), np.uint8)
        self._ages = np.zeros(num_blocks, np.int64)
        """When each label was given, by the caller's count; 0: the block has none."""

    def give(self, blocks: Int32Array, labels: Labels, ages: Int64Array) -> None:
        """Label blocks; an age of 0 removes the label. If a block is named twice, the later wins.

        Args:
            blocks: int32[N].
            labels: uint8[N, 32].
            ages: int64[N].
        """
        self._labels[blocks] = labels
        self._ages[blocks] = ages

    def of(self, blocks: Int32Array) -> tuple[Labels, Int64Array]:
        """Copies of the labels and ages of int32[N] blocks, as `give` takes them."""
        return self._labels[blocks], self._ages[blocks]

    def take(self, blocks: Int32Array | Int64Array) -> None:
        """Remove the labels of int32[N] blocks."""
        self._ages[blocks] = 0

    def take_equal(self, labels: Labels) -> None:
        """Remove the label of every block that has one of uint8[N, 32] `labels`."""
        wrong = {label.tobytes() for label in labels}
        named = np.flatnonzero(self._ages)
        is_wrong = [label.tobytes() in wrong for label in self._labels[named]]
        self._ages[named[np.array(is_wrong, np.bool_)]] = 0

    def resize(self, num_blocks: int) -> None:
        """Resize to `num_blocks` blocks; new ones have no label."""
        self._labels = _resized(self._labels, num_blocks)
        self._ages = _resized(self._ages, num_blocks)

    def clear(self) -> None:
        self._ages[:] = 0

    def held(self) -> HeldBlocks:
        """The labelled blocks, oldest label first."""
        named = np.flatnonzero(self._ages)
        blocks = named[np.argsort(self._ages[named], kind="stable")].astype(np.int32)
        return HeldBlocks(blocks, self._labels[blocks])


class BlockLabels:
    """The labels of all tiers. `apply` is called once per step, in order, after `Rows.apply`."""

    def __init__(self, limits: Limits) -> None:
        self.device = TierLabels(limits.num_blocks)
        self.host = TierLabels(limits.num_host_blocks)
        self.disk = TierLabels(limits.num_disk_blocks)
        self._pins = LabelPins(limits.num_blocks)
        self._block_size = limits.block_size
        self._is_void = np.zeros(limits.num_blocks, np.bool_)
        self._num_given = 0
        # Disk moves in flight, by target: labels and ages of stores, sources of loads.
        self._stores: dict[int, tuple[Labels, Int64Array]] = {}
        self._loads: dict[int, int] = {}

    def apply(self, plan: Plan, rows: Rows, scheduled: ScheduledRows) -> None:
        """Follow what a step names, moves and writes. Moves are taken to succeed."""
        self._name(plan.labelled_block_ids, plan.labels)
        self._pins.pin(plan.pins)
        self._begin_disk_moves(plan)
        if len(plan.swap_out_src_block_ids):
            self.host.give(
                plan.swap_out_dst_block_ids, *self.device.of(plan.swap_out_src_block_ids)
            )
        if len(plan.swap_in_src_block_ids):
            self.device.give(plan.swap_in_dst_block_ids, *self.host.of(plan.swap_in_src_block_ids))
            self._is_void[plan.swap_in_dst_block_ids] = False
        if len(src := plan.copy_src_block_ids):
            self.device.give(plan.copy_dst_block_ids, *self.device.of(src))
            self._is_void[plan.copy_dst_block_ids] = self._is_void[src]
        self._write(rows, scheduled)

    def holdings(self, rows: Rows) -> Holdings:
        """What the next scheduler is told. All results must have arrived."""
        return Holdings(
            rows.held(self.has_void),
            self.device.held(),
            self.host.held(),
            self.disk.held(),
            self._pins.held(),
        )

    def fail_swap_ins(self, plan: Plan, failed: Int32Array) -> None:
        """Follow failed swap-ins: their sources lose their labels, their targets become void.

        Args:
            plan: The step that was applied last.
            failed: int32[F], of its `swap_in_dst_block_ids`.
        """
        if len(failed):
            has_failed = np.isin(plan.swap_in_dst_block_ids, failed)
            bad = plan.swap_in_src_block_ids[has_failed]
            self._void_stores(self.host.of(bad)[0])
            self.host.take(bad)
            self._avoid(failed)

    def distrust(self, rows: Rows, failed_rows: Int64Array) -> None:
        """Remove the labels of broken rows' blocks in every tier, so that none is reused."""
        for row in failed_rows.tolist():
            blocks = rows.block_table(row)
            labels, ages = self.device.of(blocks)
            for tier in (self.device, self.host, self.disk):
                tier.take_equal(labels[ages > 0])
            self._void_stores(labels[ages > 0])
            self._avoid(blocks)

    def end_stores(self, stored: Int32Array, failed: Int32Array) -> None:
        """Label the disk blocks that were stored; those that failed hold nothing."""
        for block in stored.tolist():
            self.disk.give(np.array([block], np.int32), *self._stores.pop(block))
        for block in failed.tolist():
            del self._stores[block]

    def end_loads(self, loaded: Int32Array, failed: Int32Array) -> None:
        """Label the host blocks that were loaded; after a failed load the disk block is bad."""
        for block in loaded.tolist():
            source = np.array([self._loads.pop(block)], np.int32)
            self.host.give(np.array([block], np.int32), *self.disk.of(source))
        for block in failed.tolist():
            self.disk.take(np.array([self._loads.pop(block)], np.int32))

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
        self.device.give(blocks, labels, ages)

    def _begin_disk_moves(self, plan: Plan) -> None:
        if not len(plan.disk_store_src_block_ids) and not len(plan.disk_load_src_block_ids):
            return
        for src, dst in _pairs(plan.disk_store_src_block_ids, plan.disk_store_dst_block_ids):
            self._stores[dst] = self.host.of(np.array([src], np.int32))
        self.disk.take(plan.disk_store_dst_block_ids)
        self._loads.update(
            (dst, src)
            for src, dst in _pairs(plan.disk_load_src_block_ids, plan.disk_load_dst_block_ids)
        )
        self.host.take(plan.disk_load_dst_block_ids)

    def _write(self, rows: Rows, scheduled: ScheduledRows) -> None:
        """Remove the labels of blocks that scheduled tokens are written to."""
        firsts, offsets = np.divmod(scheduled.starts, self._block_size)  # [S]
        blocks = rows.block_tables[scheduled.rows, firsts]  # [S]
        self.device.take(blocks)
        self._is_void[blocks[offsets == 0]] = False
        if scheduled.num_decodes == len(scheduled.rows):  # one token each, and one block
            return
        lasts = (scheduled.starts + scheduled.lens - 1) // self._block_size
        for index in np.flatnonzero(lasts > firsts).tolist():
            row = scheduled.rows[index]
            blocks = rows.block_tables[row, firsts[index] + 1 : lasts[index] + 1]
            self.device.take(blocks)
            self._is_void[blocks] = False

    def _void_stores(self, labels: Labels) -> None:
        """Let stores in flight deliver none of uint8[N, 32] `labels`."""
        wrong = {label.tobytes() for label in labels}
        for label, age in self._stores.values():
            if label.tobytes() in wrong:
                age[:] = 0

    def _avoid(self, blocks: Int32Array) -> None:
        self.device.take(blocks)
        self._is_void[blocks] = True


def _resized(values: npt.NDArray[_T], length: int) -> npt.NDArray[_T]:
    """The first `length` values, padded with zeros."""
    resized = np.zeros((length, *values.shape[1:]), values.dtype)
    num_kept = min(length, len(values))
    resized[:num_kept] = values[:num_kept]
    return resized


def _pairs(src: Int32Array, dst: Int32Array) -> list[tuple[int, int]]:
    return list(zip(src.tolist(), dst.tolist(), strict=True))
