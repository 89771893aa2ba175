"""The host tier: its blocks, and which step moves what between them and the device's blocks.

Moves are requested at any time and go out with a plan, in one direction at a time: a step swaps out
or swaps in, never both. Swap-outs go first, all with the next plan, because that plan may reuse
their device blocks. Swap-ins wait for a plan without swap-outs. So that there is one, nothing is
demoted while they wait; then only preemption swaps out, and no more than what runs.

A swap-in holds a reference to its host block from its request until its step is answered. The
sequences that wait for it hold the device block.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from contract.arrays import Int32Array
from contract.hashing import BlockHash
from contract.step import StepId
from scheduler_svc.core.blocks import BlockPool, DeviceBlockId, HostBlockId
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.errors import BrokenInvariantError
from scheduler_svc.core.plan import PlanBuilder
from scheduler_svc.core.tiers.disk_tier import DiskTier


class HostBooks(NamedTuple):
    """The swap-ins under way, live; for invariants, which only read them."""

    waiting: Mapping[DeviceBlockId, HostBlockId]
    """Those that have not gone out."""
    sent: list[tuple[DeviceBlockId, HostBlockId]]
    """Those that are not answered."""
    targets: Mapping[HostBlockId, DeviceBlockId]


class HostTier:
    """Owns the host blocks, and the moves under way."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        # Without a prefix cache there is something to evict only after a scheduler's restart: what
        # was swapped out and is not claimed yet, or never will be. The disk is not written for it.
        demotes = config.num_disk_blocks > 0 and config.enable_prefix_caching
        self.pool = BlockPool(
            config.num_host_blocks,
            HostBlockId,
            on_evict=self._evict if demotes else None,
            eviction=config.eviction,
        )
        self.disk = DiskTier(config, self.pool)
        self.num_swapped_out = 0
        self.num_swapped_in = 0
        self.num_demoted = 0
        self.num_promoted = 0
        # By host block: of two moves to one, as when it is evicted again, the later counts.
        self._swap_outs: dict[HostBlockId, DeviceBlockId] = {}
        self._swap_ins: dict[DeviceBlockId, HostBlockId] = {}  # first come, first served
        self._in_flight: deque[tuple[StepId, dict[DeviceBlockId, HostBlockId]]] = deque()
        self._targets: dict[HostBlockId, DeviceBlockId] = {}  # of swap-ins not answered
        self.loses_evicted = False
        """Whether what this step evicts from the device is lost: it may be one that swaps in."""
        self._num_demotions_left = 0

    # --- a step ---------------------------------------------------------------------------------

    @property
    def has_moves(self) -> bool:
        """Whether a plan must go out, even if it computes nothing."""
        return bool(self._swap_outs or self._swap_ins) or self.disk.has_moves

    @property
    def is_moving(self) -> bool:
        """Whether blocks are on their way between host and device, or about to be."""
        return bool(self._swap_outs or self._swap_ins or self._in_flight)

    def begin_step(self) -> None:
        """Start planning a step."""
        self.loses_evicted = bool(self._swap_ins)
        self._num_demotions_left = 0 if self._swap_ins else self._config.max_swap_blocks

    def send(self, draft: PlanBuilder) -> None:
        """Put what can move into a plan that goes out."""
        self.disk.send(draft)
        if self._swap_outs:
            draft.swap_out_src = list(self._swap_outs.values())
            draft.swap_out_dst = list(self._swap_outs)
            self._swap_outs = {}
            self.num_swapped_out += len(draft.swap_out_src)
        elif self._swap_ins:
            moves = dict(list(self._swap_ins.items())[: self._config.max_swap_blocks])
            for target in moves:
                del self._swap_ins[target]
            draft.swap_in_src, draft.swap_in_dst = list(moves.values()), list(moves)
            self._in_flight.append((draft.step_id, moves))
            self.num_swapped_in += len(moves)

    def answer(self, step: StepId, failed: Int32Array) -> None:
        """End a step's swap-ins; what the host held for `failed` ones is forgotten.

        Raises:
            BrokenInvariantError: One of `failed` is not of this step.
        """
        moves: dict[DeviceBlockId, HostBlockId] = {}
        if self._in_flight and self._in_flight[0][0] == step:
            _, moves = self._in_flight.popleft()
        for target in map(DeviceBlockId, failed.tolist()):
            if target not in moves:
                raise BrokenInvariantError(f"step {step} did not swap block {target} in")
            self.pool.forget([moves[target]])
        self._end(moves)

    @property
    def books(self) -> HostBooks:
        """The swap-ins under way."""
        sent = [move for _, moves in self._in_flight for move in moves.items()]
        return HostBooks(self._swap_ins, sent, self._targets)

    # --- sequences ------------------------------------------------------------------------------

    def swap_out(
        self, blocks: Sequence[DeviceBlockId], hashes: Sequence[BlockHash]
    ) -> list[HostBlockId]:
        """Copy device blocks with the next plan, before which nothing new may write them.

        Args:
            blocks: As many as `num_available` of the pool, at most.
            hashes: Of the first of them, the full ones; found on the host from now on.

        Returns:
            The host blocks; the caller holds them.
        """
        targets = self.pool.allocate(len(blocks))
        self._swap_outs.update(zip(targets, blocks, strict=True))
        self.pool.publish(targets[: len(hashes)], hashes)
        return targets

    def swap_in(self, sources: Iterable[HostBlockId], targets: Iterable[DeviceBlockId]) -> None:
        """Copy held host blocks to device blocks, as soon as a step has room; takes the references.

        `is_loading` is true of the targets until the step that copies them is answered.
        """
        for source, target in zip(sources, targets, strict=True):
            self._swap_ins[target] = source
            self._targets[source] = target

    def cancel_swap_ins(self, targets: Iterable[DeviceBlockId]) -> None:
        """Cancel those of `targets` that have not gone out; no sequence waits for them any more."""
        for target in targets:
            if (source := self._swap_ins.pop(target, None)) is not None:
                self._end({target: source})

    def is_waiting(self, target: DeviceBlockId) -> bool:
        """Whether the swap-in to `target` has not gone out."""
        return target in self._swap_ins

    def is_loading(self, target: DeviceBlockId) -> bool:
        """Whether the swap-in to `target` has not been answered."""
        return target in self._swap_ins or any(target in moves for _, moves in self._in_flight)

    def is_leaving_device(self, block: HostBlockId) -> bool:
        """Whether a plan that has not gone out will fill a host block."""
        return block in self._swap_outs

    def take_free(self) -> HostBlockId:
        """Return a free host block, which nothing else will be copied to."""
        (block,) = self.pool.allocate(1)
        self._swap_outs.pop(block, None)
        return block

    def _end(self, moves: dict[DeviceBlockId, HostBlockId]) -> None:
        for target, source in moves.items():
            if self._targets.get(source) == target:
                del self._targets[source]
        self.pool.drop(list(moves.values()))

    # --- the prefix cache -----------------------------------------------------------------------

    @property
    def num_demotions_left(self) -> int:
        """Cached device blocks that the plan being made can demote without delaying swap-ins."""
        if self._swap_ins and not self._swap_outs:
            return 0
        return min(self._num_demotions_left, self.pool.num_available)

    def demote(self, block: DeviceBlockId, block_hash: BlockHash) -> None:
        """Keep the content of a cached device block that the next plan reuses or takes out of use.

        If that is between two steps, what the last one has left of its demotions bounds it.
        """
        if found := self.pool.find([block_hash]):
            self.pool.share(found)  # as good as new
            self.pool.drop(found)
        elif self._num_demotions_left and self.pool.num_available:
            self._num_demotions_left -= 1
            self.num_demoted += 1
            # As `swap_out`, which this is most of the calls of.
            targets = self.pool.allocate(1)
            self._swap_outs[targets[0]] = block
            self.pool.publish(targets, [block_hash])
            self.pool.drop(targets)

    def _evict(self, block: HostBlockId, block_hash: BlockHash) -> None:
        """Demote a host block that is being reused, unless it has not even been filled."""
        if not self.is_leaving_device(block):
            self.disk.demote(block, block_hash)

    def find(self, hashes: Iterable[BlockHash]) -> tuple[list[DeviceBlockId], list[HostBlockId]]:
        """Look up the longest prefix of `hashes` that the host has; changes nothing.

        Returns:
            Blocks that are being swapped in already, for another sequence; and the host blocks
            after them.
        """
        loading: list[DeviceBlockId] = []
        sources: list[HostBlockId] = []
        for block in self.pool.find(hashes):
            if not sources and (target := self._targets.get(block)) is not None:
                loading.append(target)
            else:
                sources.append(block)
        return loading, sources

    def forget(self, hashes: Iterable[BlockHash]) -> None:
        """Make contents unfindable here and on the disk: they are not to be trusted."""
        for block_hash in hashes:
            self.pool.forget(self.pool.find([block_hash]))
            self.disk.forget([block_hash])

    def counts(self) -> dict[str, int]:
        """Return its part of a `SchedulerLoad`, and the disk's, by field."""
        return {
            "num_host_blocks": self.pool.num_blocks,
            "num_free_host_blocks": self.pool.num_free,
            "num_cached_host_blocks": self.pool.num_cached,
            "num_swapped_out_blocks": self.num_swapped_out,
            "num_swapped_in_blocks": self.num_swapped_in,
            "num_demoted_blocks": self.num_demoted,
            "num_promoted_blocks": self.num_promoted,
            **self.disk.counts(),
        }
