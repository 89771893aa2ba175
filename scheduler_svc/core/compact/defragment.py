"""Moves held blocks to the low end of the pool, so that the free blocks become one run.

If H blocks are held, the held blocks with the number H or a higher one move to numbers below H. A
*pass* lists these blocks and the tables that name them. Then each step moves a few of the blocks,
highest first, by copies in its plan. Sequences keep running during a pass, so each entry of the
lists is checked again before use:

    source    a held block. All its holders must be tables or pins that the pass knows. So a block
              does not move while a step in flight holds it, or while a fork copies from it. A block
              that is being swapped in, or to which the plan copies already, does not move either.
    target    a free or a cached block. If the target is free, the source is copied to the target,
              and the source is not allocated again before the step's result. If the target is
              cached, source and target exchange contents by two copies in one plan; this works
              because the worker reads all blocks of a plan's copies before it writes any. Free
              blocks below H are used first, then cached blocks below H. If there is neither, any
              free block below the source is used.

While the pool shrinks, passes of another kind run instead. They *evacuate* the blocks beyond the
pool's new end: they move the held blocks to free blocks below the end. If no free block is left
there, they evict a cached one.

Beginning a pass takes time in proportion to the pool and the tables. Within a pass, a step takes
time in proportion to its moves. Without a pass, the cost of a step is one comparison.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import cast

import numpy as np

from contract.step import StepId
from scheduler_svc.core.compact.fragmentation import Fragmentation, measure
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.plan import PlanBuilder
from scheduler_svc.core.running import RunningSet
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.space.blocks import BlockPool, DeviceBlockId
from scheduler_svc.core.space.pins import Pins
from scheduler_svc.core.tiers.host_tier import HostTier

_NOW, _NEVER = float("-inf"), float("inf")
_LEAST_RATE = 1e-9
"""Unless `request_pass` was called, a pass begins only at this fragmentation rate or a higher one,
even if `defragment_threshold` is 0."""


@dataclass(frozen=True, slots=True)
class DefragmentationReport:
    """The fragmentation of the device pool before and after a pass."""

    before: Fragmentation
    after: Fragmentation
    """Equal to `before` if there was no pass."""
    num_moved_blocks: int
    has_moved: bool
    """Whether there was a pass; if not, the pool was only measured."""


_NOTHING = Fragmentation(num_free_blocks=0, longest_free_run=0)


class _Owners:
    """The block table entries that named each block when a pass began."""

    def __init__(self, running: Iterable[Sequence], border: DeviceBlockId) -> None:
        """List the table entries that name blocks from `border` on."""
        # There may be a hundred thousand entries, so they are sorted as parallel arrays.
        self._seqs = list(running)
        lens = np.array([len(seq.block_ids) for seq in self._seqs], np.intp)
        tables = chain.from_iterable(seq.block_ids for seq in self._seqs)
        blocks = np.fromiter(tables, np.int32, int(lens.sum()))
        (places,) = np.nonzero(blocks >= border)
        places = places[np.argsort(blocks[places], kind="stable")]
        seq_of = np.repeat(np.arange(len(lens)), lens)[places]
        starts = np.cumsum(lens) - lens
        self._blocks: list[int] = blocks[places].tolist()
        self._seq_of: list[int] = seq_of.tolist()
        self._index: list[int] = (places - starts[seq_of]).tolist()

    def of(self, block: DeviceBlockId) -> list[tuple[Sequence, int]]:
        """Return each sequence whose table still names the block, and the index in that table."""
        owners = []
        for place in range(bisect_left(self._blocks, block), len(self._blocks)):
            if self._blocks[place] != block:
                break
            seq, index = self._seqs[self._seq_of[place]], self._index[place]
            if index < len(seq.block_ids) and seq.block_ids[index] == block:
                owners.append((seq, index))
        return owners


@dataclass(slots=True)
class _Pass:
    before: Fragmentation
    border: DeviceBlockId
    """Held blocks move below this number."""
    sources: list[DeviceBlockId]
    """The held blocks to move, in ascending order; the pass takes them from the end."""
    free_targets: list[DeviceBlockId]
    """Blocks below the border that had no holder when the pass began, in descending order. If the
    pool has no free block below the border, the pass takes blocks from the end of this list until
    it finds a cached one."""
    owners: _Owners
    evacuates: bool = False
    """Whether the pass only empties the blocks beyond the border; such a pass has no report."""
    num_moved: int = 0
    last_step: StepId | None = None
    """The last step that moved a block; None before the first."""


class Defragmenter:
    """Runs passes, at most one at a time, and adds their moves to plans."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool[DeviceBlockId],
        tier: HostTier,
        running: RunningSet,
        pins: Pins,
    ) -> None:
        self._config = config
        self._pool = pool
        self._tier = tier
        self._running = running
        self._pins = pins
        self._pass: _Pass | None = None
        self._is_wanted = False
        self._interval_s = config.defragment_interval_s or _NEVER
        self._next_look = 0.0 if config.defragment_interval_s else _NEVER
        self._reports: tuple[DefragmentationReport, ...] = ()
        self.due = self._next_look
        """From this time on, the caller must call `plan` for every plan."""
        self.num_moved = 0
        self.num_passes = 0

    def request_pass(self) -> None:
        """Begin a pass with the next step or after the current pass, at any fragmentation rate."""
        self._is_wanted = True
        self.due = _NOW

    def evacuate(self) -> None:
        """Begin to move the held blocks beyond the new end of the shrinking pool."""
        self.due = _NOW

    def on_resized(self) -> None:
        """Remove blocks beyond the pool's new size from the current pass."""
        if self._pass is not None:
            end = self._pool.num_blocks
            # The targets are below all sources: if one is beyond the end, no source is left
            self._pass.sources = [block for block in self._pass.sources if block < end]

    def take_reports(self) -> tuple[DefragmentationReport, ...]:
        """Return the reports since the last call."""
        reports, self._reports = self._reports, ()
        return reports

    def plan(self, builder: PlanBuilder, num_in_flight: int) -> None:
        """Add moves to a plan that is otherwise complete.

        Once the time `due` has come, the caller must call this method for every plan.

        Args:
            builder: Makes the plan. If the plan has copies after this call, the caller must send
                it, even if it computes no tokens.
            num_in_flight: Number of earlier steps without a result.
        """
        if self._pass is None and self._pool.num_leaving:
            self._pass = self._begin_evacuation()
        elif self._pass is None and (self._is_wanted or builder.now >= self._next_look):
            self._look(builder.now)
        if self._pass is not None:
            self._advance(self._pass, builder, num_in_flight)
        is_idle = self._pass is None and not self._is_wanted and not self._pool.num_leaving
        self.due = self._next_look if is_idle else _NOW

    def _look(self, now: float) -> None:
        """Measure the pool; begin a pass if one was requested or the fragmentation rate is high."""
        before = measure(self._pool.usable_ref_counts)
        is_wanted, self._is_wanted = self._is_wanted, False
        self._next_look = now + self._interval_s
        if is_wanted or before.rate >= max(self._config.defragment_threshold, _LEAST_RATE):
            self._pass = self._begin(before)
        else:
            self._reports += (DefragmentationReport(before, before, 0, has_moved=False),)

    def _begin(self, before: Fragmentation) -> _Pass:
        pool = self._pool
        border = DeviceBlockId(pool.num_blocks - before.num_free_blocks)
        pool.set_border(border)
        counts = pool.ref_counts
        sources = border + np.flatnonzero(counts[border:])
        free = np.flatnonzero(counts[:border] == 0)[::-1]
        return _Pass(
            before=before,
            border=border,
            sources=cast("list[DeviceBlockId]", sources.tolist()),
            free_targets=cast("list[DeviceBlockId]", free.tolist()),
            owners=_Owners(self._running, border),
        )

    def _begin_evacuation(self) -> _Pass:
        border = DeviceBlockId(self._pool.num_usable)
        sources = border + np.flatnonzero(self._pool.ref_counts[border:])
        return _Pass(
            before=_NOTHING,
            border=border,
            sources=cast("list[DeviceBlockId]", sources.tolist()),
            free_targets=[],
            owners=_Owners(self._running, border),
            evacuates=True,
        )

    def _advance(self, current: _Pass, builder: PlanBuilder, num_in_flight: int) -> None:
        """Move some blocks of a pass, or end it."""
        num_moved = self._move(current, builder)
        if num_moved:
            current.num_moved += num_moved
            self.num_moved += num_moved
            current.last_step = builder.step_id
        elif builder.step_id - num_in_flight > (current.last_step or 0):
            # Every step that moved blocks has a result, so the old blocks are free now.
            self._pass = None
            if current.evacuates:
                return
            self.num_passes += 1
            after = measure(self._pool.usable_ref_counts)
            self._reports += (
                DefragmentationReport(current.before, after, current.num_moved, has_moved=True),
            )

    def _move(self, current: _Pass, builder: PlanBuilder) -> int:
        num_moved = 0
        written = {*builder.copy_dst}
        for _ in range(self._config.max_defragment_moves):
            if not current.sources:
                break
            src = current.sources.pop()
            owners = current.owners.of(src)
            if src in written or not self._is_movable(src, len(owners)):
                continue
            dst, is_cached = self._take_target(current, src)
            if dst is None:
                break
            builder.copy(src, dst)
            if is_cached:
                builder.copy(dst, src)
            else:
                builder.copied.append(src)
            num_moved += 1 + is_cached
            self._pool.exchange(src, dst)
            for seq, index in owners:
                seq.block_ids[index] = dst
            if src in self._pins:
                self._pins.rename(src, dst)
            builder.renamed_src.append(src)
            builder.renamed_dst.append(dst)
        return num_moved

    def _is_movable(self, block: DeviceBlockId, num_tables: int) -> bool:
        """Whether a block is held and all its holders can be updated if it moves."""
        num_known = num_tables + (block in self._pins)
        is_known = self._pool.ref_count(block) == num_known > 0
        return is_known and not self._tier.is_loading(block)

    def _take_target(self, current: _Pass, src: DeviceBlockId) -> tuple[DeviceBlockId | None, bool]:
        """Return the target to move `src` to, if there is one, and whether the target is cached."""
        if (free := self._pool.allocate_before(current.border)) is not None:
            return free, False
        if current.evacuates:  # a block is available, unless unclaimed rows hold too many
            has_room = self._pool.num_free + self._pool.num_cached > 0
            return (self._pool.allocate(1)[0] if has_room else None), False
        while current.free_targets:
            if self._pool.is_cached(target := current.free_targets.pop()):
                return target, True
        return self._pool.allocate_before(src), False
