"""Makes room on the host by taking blocks from waiting sequences.

First, waiting sequences stop holding blocks that were fetched for them; these blocks stay in the
prefix cache until they are evicted. If this is not enough, swapped sequences *spill*: their last
blocks are moved to the disk. The sequence that is last in the policy's order spills first.

If spills cannot make enough room, KV is dropped. If a preempted sequence needs the room, its own KV
is dropped. If the first sequence in the queue needs the room, other swapped sequences lose their
KV, beginning with the last in the policy's order.
"""

from collections.abc import Iterator
from itertools import chain, repeat

from contract.hashing import BlockHash
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.live_sequences import LiveSequences
from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.sequence import SeqStatus, Sequence
from scheduler_svc.core.space.blocks import DiskBlockId, HostBlockId
from scheduler_svc.core.space.kv_groups import KvGroups
from scheduler_svc.core.tiers.costs import Costs
from scheduler_svc.core.tiers.host_tier import HostTier


class HostRoom:
    """Frees host and disk blocks that waiting sequences hold."""

    def __init__(
        self,
        config: SchedulerConfig,
        groups: KvGroups,
        tier: HostTier,
        queue: WaitingQueue,
        live: LiveSequences,
    ) -> None:
        self.num_spilled = 0
        self._groups = groups
        self._block_size = config.block_size
        self._costs = Costs(config)
        self._tier = tier
        self._queue = queue
        self._live = live

    def make_for_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Make room for the blocks of a preempted sequence if a swap is worth its cost.

        Returns:
            Whether the host has room, and the swap is worth its cost.
        """
        if num_blocks > self._tier.pool.num_blocks:
            return False
        if not self._costs.should_swap(num_blocks, 0, num_tokens):
            return False
        self._let_go(num_blocks)
        if num_blocks > self._tier.pool.num_available:
            if (spills := self._find_spills(num_blocks)) is None:
                return False
            num_spilled = sum(len(seq.host_block_ids) - keep for seq, keep in spills)
            if not self._costs.should_swap(num_blocks, num_spilled, num_tokens):
                return False
            for seq, num_kept in spills:
                self._spill(seq, num_kept)
        return True

    def make_for_fetch(self, seq: Sequence, num_blocks: int) -> bool:
        """Make room to load spilled blocks of `seq`, which is first in the queue.

        Returns:
            Whether there is room now. If not, the moves in progress may make room later.
        """
        self._let_go(num_blocks)
        if num_blocks > self._tier.pool.num_available:
            for other, num_kept in self._find_spills(num_blocks, seq) or ():
                self._spill(other, num_kept)
        if self._tier.is_moving or self._tier.disk.is_loading:
            return num_blocks <= self._tier.pool.num_available
        for other in self._last_first(SeqStatus.SWAPPED, seq):
            if num_blocks <= self._tier.pool.num_available:
                break
            self.give_up(other)
        return num_blocks <= self._tier.pool.num_available

    def give_up(self, seq: Sequence) -> None:
        """Drop the KV of a swapped sequence; the sequence will compute its tokens again."""
        self._queue.remove(seq)
        self.release(seq)
        seq.set_status(SeqStatus.WAITING)
        self._queue.push(seq)

    def spilled_to(self, block: DiskBlockId) -> list[Sequence]:
        """Return the swapped sequences that have KV in the disk block `block`."""
        return [
            seq
            for seq in self._live
            if seq.status is SeqStatus.SWAPPED and block in seq.disk_block_ids
        ]

    def release(self, seq: Sequence) -> None:
        """Drop all host and disk blocks of a sequence."""
        self._tier.pool.drop(seq.host_block_ids)
        self._tier.pool.drop(seq.fetched_block_ids)
        self._tier.disk.pool.drop(seq.disk_block_ids)
        seq.host_block_ids, seq.fetched_block_ids, seq.disk_block_ids = (), (), ()

    def names(self, seq: Sequence) -> list[BlockHash]:
        """Return the hashes of a swapped sequence's full blocks; empty without a prefix cache."""
        num_full = min(seq.num_computed_tokens // self._block_size, len(seq.block_hashes))
        places = self._groups.kept(seq.num_computed_tokens)
        full = [place for place in places if place < num_full * self._groups.num]
        return self._groups.names(seq.block_hashes, full)

    def _last_first(self, status: SeqStatus, but: Sequence | None = None) -> Iterator[Sequence]:
        seqs = [
            seq
            for seq in self._live
            if seq.status is status
            and (seq.host_block_ids or seq.fetched_block_ids)
            and seq is not but
        ]
        return iter(sorted(seqs, key=self._queue.sort_key, reverse=True))

    def _let_go(self, num_blocks: int) -> None:
        """Drop blocks that were fetched for waiting sequences, until `num_blocks` are available."""
        if num_blocks <= self._tier.pool.num_available:
            return
        for seq in self._last_first(SeqStatus.WAITING):
            self._tier.pool.drop(seq.fetched_block_ids)
            seq.fetched_block_ids = ()
            if num_blocks <= self._tier.pool.num_available:
                return

    def _find_spills(
        self, num_blocks: int, but: Sequence | None = None
    ) -> list[tuple[Sequence, int]] | None:
        """Find the sequences that must spill to make `num_blocks` host blocks available.

        Returns:
            Each sequence with the number of host blocks that it keeps. None: spills cannot make
            that many blocks available.
        """
        pool = self._tier.pool
        num_lacking, num_disk_blocks = (
            num_blocks - pool.num_available,
            self._tier.disk.pool.num_available,
        )
        spills = []
        for seq in self._last_first(SeqStatus.SWAPPED, but):
            if any(map(self._tier.is_leaving_device, seq.host_block_ids)):
                continue  # its host blocks are not filled yet
            num_kept = len(seq.host_block_ids)
            while num_kept and num_lacking > 0:
                num_kept -= 1
                num_disk_blocks -= 1
                num_lacking -= pool.ref_count(seq.host_block_ids[num_kept]) == 1
            spills.append((seq, num_kept))
            if num_lacking <= 0:
                return spills if num_disk_blocks >= 0 else None
        return None

    def _spill(self, seq: Sequence, num_kept: int) -> None:
        """Move the last host blocks of a swapped sequence to the disk with the next plan."""
        spilled: tuple[HostBlockId, ...] = seq.host_block_ids[num_kept:]
        hashes = self.names(seq)[num_kept:]
        kept = map(self._tier.disk.keep, spilled, chain(hashes, repeat(None)))
        seq.disk_block_ids = (*kept, *seq.disk_block_ids)
        seq.host_block_ids = seq.host_block_ids[:num_kept]
        self._tier.pool.drop(spilled)
        self.num_spilled += len(spilled)
