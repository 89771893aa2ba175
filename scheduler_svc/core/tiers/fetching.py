"""Loads the KV of waiting sequences from the disk to the host.

Two kinds of sequences wait for the disk:

    swapped  A swapped sequence may have spilled: some of its host blocks were moved to the disk.
             It needs all its KV back before it can run.
    new      The device and the host may have the first blocks of a new sequence's prompt, and the
             disk the blocks that follow. If one of these disk blocks does not fit on the host or
             cannot be loaded, the sequence computes the block's tokens.

A sequence of either kind is FETCHING, and out of the queue, until its last load has ended. So the
sequences behind it in the queue can run. When the last load has ended, the sequence is queued
again, in the order of the policy.
"""

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from enum import Enum, auto

from contract.hashing import BlockHash
from contract.step import Result
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.prefix import KvLookup
from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.sequence import SeqStatus, Sequence
from scheduler_svc.core.space.blocks import DiskBlockId, HostBlockId
from scheduler_svc.core.tiers.costs import Costs
from scheduler_svc.core.tiers.host_room import HostRoom
from scheduler_svc.core.tiers.host_tier import HostTier

_Known = tuple[DiskBlockId, BlockHash | None]
"""A disk block to load, and the hash of its content. The hash is None if the prefix cache must not
find the content, for example because the block is partial."""


class FetchStatus(Enum):
    """Whether the first sequence in the queue may start, or must wait for the disk."""

    READY = auto()
    """The sequence does not have to wait for the disk."""
    FETCHING = auto()
    """The sequence has left the queue and waits for loads."""
    LATER = auto()
    """The sequence is swapped, and its blocks cannot be loaded yet, because the host lacks room or
    because a block is still being stored to the disk."""


class Fetching:
    """Takes sequences out of the queue while their KV is loaded, and queues them again."""

    def __init__(
        self,
        config: SchedulerConfig,
        lookup: KvLookup,
        tier: HostTier,
        room: HostRoom,
        queue: WaitingQueue,
    ) -> None:
        self._block_size = config.block_size
        self._is_enabled = config.num_disk_blocks > 0
        self._costs = Costs(config)
        self._lookup = lookup
        self._tier = tier
        self._disk = tier.disk
        self._room = room
        self._queue = queue
        self._awaited: dict[Sequence, set[HostBlockId]] = {}
        # Ordered, so that every run frees blocks in the same order
        self._waiters: dict[HostBlockId, dict[Sequence, None]] = {}

    def __len__(self) -> int:
        return len(self._awaited)

    @property
    def num_swapped(self) -> int:
        """Number of fetching sequences that were SWAPPED before they became FETCHING."""
        return sum(bool(seq.disk_block_ids) for seq in self._awaited)

    @property
    def awaited(self) -> Mapping[Sequence, AbstractSet[HostBlockId]]:
        """For each fetching sequence, the host blocks whose loads it waits for."""
        return self._awaited

    @property
    def waiters(self) -> Mapping[HostBlockId, Collection[Sequence]]:
        """For each host block that is being loaded, the sequences that wait for it."""
        return self._waiters

    # --- starting to fetch ----------------------------------------------------------------------

    def enqueue(self, seq: Sequence) -> None:
        """Queue a new sequence, at once or after blocks of its prefix are loaded from the disk.

        The blocks are loaded if this costs less than to compute their tokens, and if there is room
        for all of them. The sequence is not first in the queue yet, so its loads leave half of the
        host blocks to other sequences.
        """
        room = self._tier.pool.num_available - self._tier.pool.num_blocks // 2
        if not (self._is_enabled and self._fetch_prefix(seq, room, may_be_part=False)):
            self._queue.push(seq)

    def at_turn(self, seq: Sequence, *, has_room: bool) -> FetchStatus:
        """Begin to fetch the KV that the first sequence in the queue needs.

        Args:
            seq: The first sequence in the queue.
            has_room: Whether the device has room for the sequence. Without this room, a swapped
                sequence takes no host blocks from other sequences.
        """
        if not self._is_enabled:
            return FetchStatus.READY
        if seq.status is SeqStatus.SWAPPED:
            return self._fetch_spilled(seq, has_room=has_room)
        if self._fetch_prefix(seq, self._tier.pool.num_available, may_be_part=True):
            return FetchStatus.FETCHING
        return FetchStatus.READY

    def _fetch_prefix(self, seq: Sequence, room: int, *, may_be_part: bool) -> bool:
        """Fetch the blocks of a sequence's prefix that the device lacks and the host or disk has.

        The sequence becomes a holder of the blocks that are on the host, and the blocks that are on
        the disk are loaded. Nothing is fetched if the host has all these blocks, or if to load them
        costs more than to compute their tokens (`Costs`).

        Args:
            seq: A waiting sequence, in the queue or not.
            room: How many of the available host blocks the sequence may take at most.
            may_be_part: Whether to fetch only the first blocks if `room` is too small for all. If
                false, nothing is fetched in this case.

        Returns:
            Whether the sequence waits for loads.
        """
        hashes = self._lookup.past_device(seq)
        num_on_host = len(self._tier.pool.find(hashes))
        if not self._disk.pool.find(hashes[num_on_host : num_on_host + 1]):
            return False  # the usual case, since this is called for every step
        held: list[HostBlockId] = []
        loads: list[_Known] = []
        num_saved = 0
        for block_hash in hashes:
            source = None
            if not (on_host := self._tier.pool.find([block_hash])):
                if not (on_disk := self._disk.pool.find([block_hash])):
                    break
                source = on_disk[0]
                target = self._disk.target(source)
                on_host = [] if target is None else [target]
            room -= not on_host or self._tier.pool.ref_count(on_host[0]) == 0
            if room < 0:
                if may_be_part:
                    break
                return False
            if source is None:
                held += on_host
            else:
                loads.append((source, block_hash))
            num_saved += bool(loads)
        if not loads or not self._costs.should_load(len(loads), num_saved * self._block_size):
            return False
        fetched = {*seq.fetched_block_ids}
        held = [block for block in held if block not in fetched]
        self._tier.pool.share(held)
        seq.fetched_block_ids += (*held, *self._begin(seq, loads))
        return True

    def _fetch_spilled(self, seq: Sequence, *, has_room: bool) -> FetchStatus:
        """Load the spilled blocks of a swapped sequence, if it has any."""
        if not seq.disk_block_ids:
            return FetchStatus.READY
        pool, num_kept = self._tier.pool, len(seq.host_block_ids)
        hashes = self._room.names(seq)[num_kept:]
        # For each disk block, the host block with its content, which may still be loading.
        on_host: list[HostBlockId | None] = []
        for index, source in enumerate(seq.disk_block_ids):
            found = pool.find(hashes[index : index + 1])
            on_host.append(found[0] if found else self._disk.target(source))
            if on_host[-1] is None and self._disk.is_storing(source):
                return FetchStatus.LATER
        present = [block for block in on_host if block is not None]
        pool.share(present)  # first, so that `make_for_fetch` does not free them
        num_missing = len(on_host) - len(present)
        if num_missing > pool.num_available and not (
            has_room and self._room.make_for_fetch(seq, num_missing)
        ):
            pool.drop(present)
            return FetchStatus.LATER
        padded = [*hashes, *[None] * (len(on_host) - len(hashes))]
        missing = [
            (source, block_hash)
            for source, block_hash, block in zip(seq.disk_block_ids, padded, on_host, strict=True)
            if block is None
        ]
        loading = iter(self._begin(seq, missing, present))
        seq.host_block_ids += tuple(next(loading) if b is None else b for b in on_host)
        if not self._awaited[seq]:
            self._requeue(seq)
        return FetchStatus.FETCHING

    def _begin(
        self, seq: Sequence, loads: Iterable[_Known], present: Iterable[HostBlockId] = ()
    ) -> list[HostBlockId]:
        """Start loads for a sequence, and take it out of the queue until they have ended.

        Args:
            seq: A waiting sequence, in the queue or not.
            loads: The disk blocks to load. If a block is being loaded already, no second load
                starts, and the sequence waits for the load in progress.
            present: Host blocks that the sequence holds. If some of them are still being loaded,
                the sequence waits for these loads, too.

        Returns:
            For each disk block of `loads`, the host block into which it is loaded. The sequence
            holds these host blocks.
        """
        loads = list(loads)
        # Hold the disk blocks first, because allocations may evict blocks of both tiers.
        self._disk.pool.share([source for source, _ in loads])
        targets = []
        for source, block_hash in loads:
            if (target := self._disk.target(source)) is None:
                target = self._tier.take_free()
                self._disk.load(source, target, block_hash)
            self._tier.pool.share([target])
            targets.append(target)
        self._disk.pool.drop([source for source, _ in loads])
        awaited = {block for block in (*targets, *present) if self._disk.is_loading_to(block)}
        if seq in self._queue:
            self._queue.remove(seq)
        seq.set_status(SeqStatus.FETCHING)
        self._awaited[seq] = awaited
        for target in awaited:
            self._waiters.setdefault(target, {})[seq] = None
        return targets

    # --- ending ---------------------------------------------------------------------------------

    def answer(self, result: Result) -> None:
        """Record stores and loads that ended; queue sequences that wait for no more loads."""
        self._disk.answer(result)
        for block in map(DiskBlockId, result.failed_disk_block_ids.tolist()):
            for seq in self._room.spilled_to(block):
                self._give_up(seq)
        for target in map(HostBlockId, result.failed_host_block_ids.tolist()):
            for seq in self._waiters.pop(target, ()):
                if seq.disk_block_ids:
                    self._give_up(seq)
                else:
                    self._tier.pool.drop([target])
                    seq.fetched_block_ids = tuple(b for b in seq.fetched_block_ids if b != target)
                    self._arrive(seq, target)
        for target in map(HostBlockId, result.loaded_host_block_ids.tolist()):
            for seq in self._waiters.pop(target, ()):
                self._arrive(seq, target)

    def stop(self, seq: Sequence) -> None:
        """Let a sequence stop waiting. Its loads continue, so that the prefix cache gets the KV."""
        for target in self._awaited.pop(seq):
            if (waiters := self._waiters.get(target)) is not None:
                del waiters[seq]

    def first_expired(self, now: float) -> Sequence | None:
        """Return a fetching sequence whose deadline has passed, if any."""
        for seq in self._awaited:
            if seq.request.deadline is not None and seq.request.deadline <= now:
                return seq
        return None

    def _arrive(self, seq: Sequence, target: HostBlockId) -> None:
        self._awaited[seq].discard(target)
        if not self._awaited[seq]:
            self._requeue(seq)

    def _requeue(self, seq: Sequence) -> None:
        self.stop(seq)
        seq.set_status(SeqStatus.SWAPPED if seq.disk_block_ids else SeqStatus.WAITING)
        self._disk.pool.drop(seq.disk_block_ids)
        seq.disk_block_ids = ()
        self._queue.push(seq)

    def _give_up(self, seq: Sequence) -> None:
        """Drop all KV of a swapped sequence, because a part of the KV is lost."""
        if seq.status is SeqStatus.FETCHING:
            self._requeue(seq)
        self._room.give_up(seq)
