"""Moves held blocks to the low end of the pool, so that the free ones become one run.

With H blocks held, those at H and beyond are to change places with available ones below H. A *pass*
notes which these are, and which tables name them; then each step moves a few, highest first, as
copies among its others. Sequences run on, so what was noted is checked again when it is used:

    source    held, and all its holders are tables or a pin that the pass knows of. So a block held
              by a step in flight, or copied from by a fork, stays where it is; so does one that is
              being swapped in, or that this plan copies to.
    target    a free block: the source moves, and its old place is held until the step is
              answered. Or a cached one: the two exchange places, both copies in one list, since all
              reads come before all writes. Free ones below H are taken first, then cached ones; if
              these have been allocated since, the next free one that is lower than the source.

While the pool shrinks, passes of another kind go first, again and again until nothing is left to
do: they *evacuate* the blocks from the pool's new end on, to any available ones below, evicting
what is cached there.

A pass takes time in proportion to the pool and the tables, a step in a pass in proportion to its
moves, and a step without a pass one comparison.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import cast

import numpy as np

from contract.step import StepId
from scheduler_svc.core.blocks import BlockPool, DeviceBlockId
from scheduler_svc.core.cache.pins import Pins
from scheduler_svc.core.compact.fragmentation import Fragmentation, measure
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.plan import PlanBuilder
from scheduler_svc.core.running import RunningSet
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.tiers.host_tier import HostTier

_NOW, _NEVER = float("-inf"), float("inf")
_LEAST_RATE = 1e-9
"""With a threshold of 0 something must still be scattered."""


@dataclass(frozen=True, slots=True)
class DefragmentationReport:
    """How the device's blocks lay, before and after a pass."""

    before: Fragmentation
    after: Fragmentation
    """As `before` if there was no pass."""
    num_moved_blocks: int
    has_moved: bool
    """Whether there was a pass; else the pool was only measured."""


_NOTHING = Fragmentation(num_free_blocks=0, longest_free_run=0)


class _Owners:
    """The tables that named each block, and where, when a pass began."""

    def __init__(self, running: Iterable[Sequence], border: DeviceBlockId) -> None:
        """Look at the blocks from `border` on."""
        # There may be a hundred thousand: arrays, parallel, until they are sorted by block.
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
        """Return the tables that still name the block, by their sequences, and where."""
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
    """The number of held blocks: they are to be below it."""
    sources: list[DeviceBlockId]
    """Ascending; taken from the end."""
    free_targets: list[DeviceBlockId]
    """Descending; taken from the end, those that are cached then."""
    owners: _Owners
    evacuates: bool = False
    """Whether it only empties what is beyond the border; there is no report of it."""
    num_moved: int = 0
    last_step: StepId | None = None
    """The last that moved something; None: none has."""


class Defragmenter:
    """Begins passes, at most one at a time, and adds their moves to plans."""

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
        """`plan` need not be called before."""
        self.num_moved = 0
        self.num_passes = 0

    def request_pass(self) -> None:
        """Begin a pass with the next step, whatever the rate; after the current one, if any."""
        self._is_wanted = True
        self.due = _NOW

    def evacuate(self) -> None:
        """Move held blocks that the pool takes out of use, as long as there are any."""
        self.due = _NOW

    def on_resized(self) -> None:
        """Drop from a pass under way the places that a smaller pool does not have."""
        if self._pass is not None:
            end = self._pool.num_blocks
            self._pass.sources = [block for block in self._pass.sources if block < end]
            self._pass.free_targets = [block for block in self._pass.free_targets if block < end]

    def take_reports(self) -> tuple[DefragmentationReport, ...]:
        """Return the reports since the last call."""
        reports, self._reports = self._reports, ()
        return reports

    def plan(self, draft: PlanBuilder, num_in_flight: int) -> None:
        """Add moves to a plan that is otherwise complete; from `due` on, for every plan.

        Args:
            draft: The plan; it must be sent if it copies.
            num_in_flight: Steps sent before it that are not answered.
        """
        if self._pass is None and self._pool.num_leaving:
            self._pass = self._begin_evacuation()
        elif self._pass is None and (self._is_wanted or draft.now >= self._next_look):
            self._look(draft.now)
        if self._pass is not None:
            self._advance(self._pass, draft, num_in_flight)
        is_idle = self._pass is None and not self._is_wanted and not self._pool.num_leaving
        self.due = self._next_look if is_idle else _NOW

    def _look(self, now: float) -> None:
        """Begin a pass if there is reason to."""
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

    def _advance(self, current: _Pass, draft: PlanBuilder, num_in_flight: int) -> None:
        """Move some blocks of a pass, or end it."""
        num_moved = self._move(current, draft)
        if num_moved:
            current.num_moved += num_moved
            self.num_moved += num_moved
            current.last_step = draft.step_id
        elif draft.step_id - num_in_flight > (current.last_step or 0):  # its old places are free
            self._pass = None
            if current.evacuates:
                return
            self.num_passes += 1
            after = measure(self._pool.usable_ref_counts)
            self._reports += (
                DefragmentationReport(current.before, after, current.num_moved, has_moved=True),
            )

    def _move(self, current: _Pass, draft: PlanBuilder) -> int:
        num_moved = 0
        written = {*draft.copy_dst}
        for _ in range(self._config.max_defragment_moves):
            if not current.sources:
                break
            src = current.sources.pop()
            owners = current.owners.of(src)
            if src in written or not self._is_movable(src, len(owners)):
                continue
            dst, is_cached = self._take_target(current, src)
            if dst is None:
                current.sources.clear()
                break
            draft.copy(src, dst)
            if is_cached:
                draft.copy(dst, src)
            else:
                draft.copied.append(src)
            num_moved += 1 + is_cached
            self._pool.exchange(src, dst)
            for seq, index in owners:
                seq.block_ids[index] = dst
            if src in self._pins:
                self._pins.rename(src, dst)
            draft.renamed_src.append(src)
            draft.renamed_dst.append(dst)
        return num_moved

    def _is_movable(self, block: DeviceBlockId, num_tables: int) -> bool:
        """Whether a block is held, and all its holders can be updated if it moves."""
        num_known = num_tables + (block in self._pins)
        is_known = self._pool.ref_count(block) == num_known > 0
        return is_known and not self._tier.is_loading(block)

    def _take_target(self, current: _Pass, src: DeviceBlockId) -> tuple[DeviceBlockId | None, bool]:
        """Return where a block goes, if anywhere, and whether that is a cached block's place."""
        if (free := self._pool.allocate_before(current.border)) is not None:
            return free, False
        if current.evacuates:  # admission leaves as many, but for what unclaimed rows hold
            has_room = self._pool.num_free + self._pool.num_cached > 0
            return (self._pool.allocate(1)[0] if has_room else None), False
        while current.free_targets:
            if self._pool.is_cached(target := current.free_targets.pop()):
                return target, True
        return self._pool.allocate_before(src), False
