"""The host tier: its blocks, and moves between host blocks and device blocks.

A swap-out copies a device block to the host, and a swap-in copies a host block to the device.
Callers add moves at any time, and a plan sends them. A step swaps out or swaps in, never both. The
next plan has all pending swap-outs, because it may overwrite their device blocks.

Swap-ins wait for a plan without swap-outs. They do not wait long: while swap-ins wait, no block is
demoted, so only preemptions cause swap-outs. Preemptions soon end, because each of them leaves
fewer running sequences, and only running sequences can be preempted. A swap-in holds a reference to
its host block from the call of `swap_in` until the result of its step. The sequences that wait for
the swap-in hold the device block.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from contract.arrays import Int32Array
from contract.hashing import BlockHash
from contract.step import StepId
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.interface.errors import BrokenInvariantError
from scheduler_svc.core.plan import PlanBuilder
from scheduler_svc.core.space.blocks import BlockPool, DeviceBlockId, HostBlockId
from scheduler_svc.core.tiers.disk_tier import DiskTier


class HostBooks(NamedTuple):
    """Live, read-only views of the swap-ins that have no result yet, for `invariants.py`."""

    unsent: Mapping[DeviceBlockId, HostBlockId]
    """Swap-ins that have not been sent."""
    sent: list[tuple[DeviceBlockId, HostBlockId]]
    """Swap-ins that were sent and have no result yet."""
    targets: Mapping[HostBlockId, DeviceBlockId]


class HostTier:
    """Owns the host blocks, and the moves between host and device that are in progress."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        # Without a prefix cache, only unclaimed blocks of an earlier scheduler can be evicted. They
        # are not worth writing to the disk.
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
        # By host block: if a host block is evicted and allocated again, the later swap-out counts.
        self._swap_outs: dict[HostBlockId, DeviceBlockId] = {}
        self._swap_ins: dict[DeviceBlockId, HostBlockId] = {}  # not sent yet, oldest first
        self._in_flight: deque[tuple[StepId, dict[DeviceBlockId, HostBlockId]]] = deque()
        self._targets: dict[HostBlockId, DeviceBlockId] = {}  # of swap-ins without a result
        self.loses_evicted = False
        """Whether blocks that this step evicts from the device are lost. They are lost if the step
        may swap in, because a step that swaps in cannot demote."""
        self._num_demotions_left = 0

    # --- a step ---------------------------------------------------------------------------------

    @property
    def has_moves(self) -> bool:
        """Whether moves wait for a plan; if so, a plan must be sent even if it computes nothing."""
        return bool(self._swap_outs or self._swap_ins) or self.disk.has_moves

    @property
    def has_unsent_swap_ins(self) -> bool:
        """Whether swap-ins wait for a plan without swap-outs."""
        return bool(self._swap_ins)

    @property
    def is_moving(self) -> bool:
        """Whether moves between host and device are pending or in progress."""
        return bool(self._swap_outs or self._swap_ins or self._in_flight)

    def begin_step(self) -> None:
        self.loses_evicted = bool(self._swap_ins)
        self._num_demotions_left = 0 if self._swap_ins else self._config.max_swap_blocks

    def send(self, builder: PlanBuilder) -> None:
        """Add moves to a plan that is being sent."""
        self.disk.send(builder)
        if self._swap_outs:
            builder.swap_out_src = list(self._swap_outs.values())
            builder.swap_out_dst = list(self._swap_outs)
            self._swap_outs = {}
            self.num_swapped_out += len(builder.swap_out_src)
        elif self._swap_ins:
            moves = dict(list(self._swap_ins.items())[: self._config.max_swap_blocks])
            for target in moves:
                del self._swap_ins[target]
            builder.swap_in_src, builder.swap_in_dst = list(moves.values()), list(moves)
            self._in_flight.append((builder.step_id, moves))
            self.num_swapped_in += len(moves)

    def answer(self, step: StepId, failed: Int32Array) -> None:
        """Record the end of a step's swap-ins.

        If a swap-in has failed, its host block is no longer found by hash.

        Raises:
            BrokenInvariantError: `failed` has a block that the step did not swap in.
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
        sent = [move for _, moves in self._in_flight for move in moves.items()]
        return HostBooks(self._swap_ins, sent, self._targets)

    # --- sequences ------------------------------------------------------------------------------

    def swap_out(
        self, blocks: Sequence[DeviceBlockId], hashes: Sequence[BlockHash]
    ) -> list[HostBlockId]:
        """Copy device blocks to the host with the next plan.

        The caller may free the device blocks at once, because no step overwrites them before the
        copy.

        Args:
            blocks: The device blocks; at most as many as the host pool has available.
            hashes: The hashes of the full blocks, which come first in `blocks`. From now on the
                host blocks with their content can be found by these hashes.

        Returns:
            For each of `blocks`, the host block to which it is copied. The caller is a holder of
            each host block.
        """
        targets = self.pool.allocate(len(blocks))
        self._swap_outs.update(zip(targets, blocks, strict=True))
        self.pool.publish(targets[: len(hashes)], hashes)
        return targets

    def swap_in(self, sources: Iterable[HostBlockId], targets: Iterable[DeviceBlockId]) -> None:
        """Copy host blocks to device blocks, with the next plans that have no swap-outs.

        The caller hands over its reference to each source. `is_loading` is true for a target until
        the result of the step that copies the block.
        """
        for source, target in zip(sources, targets, strict=True):
            self._swap_ins[target] = source
            self._targets[source] = target

    def cancel_swap_ins(self, targets: Iterable[DeviceBlockId]) -> None:
        """Cancel the unsent swap-ins to `targets`, because no sequence waits for them now."""
        for target in targets:
            if (source := self._swap_ins.pop(target, None)) is not None:
                self._end({target: source})

    def is_unsent(self, target: DeviceBlockId) -> bool:
        """Whether there is a swap-in to `target` that no plan has sent yet."""
        return target in self._swap_ins

    def is_loading(self, target: DeviceBlockId) -> bool:
        """Whether a swap-in to `target` is pending or in progress."""
        return target in self._swap_ins or any(target in moves for _, moves in self._in_flight)

    def is_leaving_device(self, block: HostBlockId) -> bool:
        """Whether the next plan copies a device block to the host block `block`."""
        return block in self._swap_outs

    def take_free(self) -> HostBlockId:
        """Allocate a host block, and cancel the swap-out to this block if one is pending.

        A swap-out to a free block is pending if the block was freed or evicted before a plan sent
        the swap-out.
        """
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
        """How many more cached device blocks this plan can demote.

        0 if swap-ins wait and the plan has no swap-outs so far: a demotion is a swap-out, so it
        would delay the swap-ins.
        """
        if self._swap_ins and not self._swap_outs:
            return 0
        return min(self._num_demotions_left, self.pool.num_available)

    def demote(self, block: DeviceBlockId, block_hash: BlockHash) -> None:
        """Copy a cached device block to the host with the next plan, which may overwrite the block.

        Copies nothing if the host has the content already, if the host has no room, or if the
        step's limit on demotions is reached. A call between two steps counts against the limit of
        the earlier step.
        """
        if found := self.pool.find([block_hash]):
            self.pool.share(found)  # makes the block the most recently used
            self.pool.drop(found)
        elif self._num_demotions_left and self.pool.num_available:
            self._num_demotions_left -= 1
            self.num_demoted += 1
            # These lines are `swap_out` for one block, but faster, because demotions are frequent.
            targets = self.pool.allocate(1)
            self._swap_outs[targets[0]] = block
            self.pool.publish(targets, [block_hash])
            self.pool.drop(targets)

    def _evict(self, block: HostBlockId, block_hash: BlockHash) -> None:
        """Demote an evicted host block to the disk, if the swap-out that fills it was sent."""
        if not self.is_leaving_device(block):
            self.disk.demote(block, block_hash)

    def find(self, hashes: Iterable[BlockHash]) -> tuple[list[DeviceBlockId], list[HostBlockId]]:
        """Look up the longest prefix of `hashes` on the host; changes nothing.

        Returns:
            Two lists. The first blocks of the prefix may already have swap-ins, for another
            sequence; the first list has the targets of these swap-ins. The second list has the host
            blocks of the rest of the prefix.
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
        """Let no block on host or disk be found by `hashes` any more: the contents may be wrong."""
        for block_hash in hashes:
            self.pool.forget(self.pool.find([block_hash]))
            self.disk.forget([block_hash])

    def counts(self) -> dict[str, int]:
        """Return the host and disk tiers' fields of `SchedulerLoad`."""
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
