"""Sequences that wait for the disk: what they need is loaded to the host before their turn.

There are two kinds. One is swapped and has spilled: it needs all of its KV back. The other waits,
and a part of its prompt is on the disk, past what the device has; it computes what does not fit on
the host, or cannot be loaded. Both are FETCHING until the last load that they wait for has ended:
out of the queue, so that others run; then they go back to their place in it.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from enum import Enum, auto

from contract.hashing import BlockHash
from contract.step import Result
from scheduler_svc.core.blocks import DiskBlockId, HostBlockId
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.prefix import KvLookup
from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.sequence import SeqStatus, Sequence
from scheduler_svc.core.tiers.costs import Costs
from scheduler_svc.core.tiers.host_room import HostRoom
from scheduler_svc.core.tiers.host_tier import HostTier

_Known = tuple[DiskBlockId, BlockHash | None]
"""A disk block, and the hash of its content if that may be found."""


class FetchStatus(Enum):
    """Whether the first sequence in the queue can start."""

    READY = auto()
    """It need not wait for the disk."""
    FETCHING = auto()
    """It has left the queue, to wait for loads."""
    LATER = auto()
    """It is swapped, and its blocks cannot be loaded yet."""


class Fetching:
    """Takes sequences out of the queue, and brings them back."""

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
        self._waiters: dict[HostBlockId, set[Sequence]] = {}

    def __len__(self) -> int:
        return len(self._awaited)

    @property
    def num_swapped(self) -> int:
        """The swapped ones of them."""
        return sum(bool(seq.disk_block_ids) for seq in self._awaited)

    @property
    def awaited(self) -> Mapping[Sequence, AbstractSet[HostBlockId]]:
        """The loads that each fetching sequence waits for."""
        return self._awaited

    @property
    def waiters(self) -> Mapping[HostBlockId, AbstractSet[Sequence]]:
        """The sequences that wait for each load."""
        return self._waiters

    # --- there ----------------------------------------------------------------------------------

    def enqueue(self, seq: Sequence) -> None:
        """Queue a new sequence, or fetch its prefix from the disk ahead of its turn.

        Fetching ahead leaves half of the host to others.
        """
        room = self._tier.pool.num_available - self._tier.pool.num_blocks // 2
        if not (self._is_enabled and self._fetch_prefix(seq, room, may_be_part=False)):
            self._queue.push(seq)

    def at_turn(self, seq: Sequence, *, has_room: bool) -> FetchStatus:
        """Fetch what the first in the queue needs.

        Args:
            seq: The first sequence in the queue.
            has_room: Whether the device could take it: then others give up room on the host.
        """
        if not self._is_enabled:
            return FetchStatus.READY
        if seq.status is SeqStatus.SWAPPED:
            return self._fetch_spilled(seq, has_room=has_room)
        if self._fetch_prefix(seq, self._tier.pool.num_available, may_be_part=True):
            return FetchStatus.FETCHING
        return FetchStatus.READY

    def _fetch_prefix(self, seq: Sequence, room: int, *, may_be_part: bool) -> bool:
        """Hold what the host has of a prefix past the device's part, and load the rest.

        Args:
            seq: A waiting sequence, in the queue or not.
            room: Most host blocks to take.
            may_be_part: Whether to load a part if they do not suffice for all.

        Returns:
            Whether there is something to wait for.
        """
        hashes = self._lookup.past_device(seq)
        num_on_host = len(self._tier.pool.find(hashes))
        if not self._disk.pool.find(hashes[num_on_host : num_on_host + 1]):
            return False  # as most often, each time that the first in the queue is looked at
        held: list[HostBlockId] = []
        loads: list[_Known] = []
        num_spared = 0
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
            num_spared += bool(loads)
        if not loads or not self._costs.should_load(len(loads), num_spared * self._block_size):
            return False
        fetched = {*seq.fetched_block_ids}
        held = [block for block in held if block not in fetched]
        self._tier.pool.share(held)
        seq.fetched_block_ids += (*held, *self._begin(seq, loads))
        return True

    def _fetch_spilled(self, seq: Sequence, *, has_room: bool) -> FetchStatus:
        """Load a swapped sequence's spilled blocks, if it has any."""
        if not seq.disk_block_ids:
            return FetchStatus.READY
        pool, num_kept = self._tier.pool, len(seq.host_block_ids)
        num_full = seq.num_computed_tokens // self._block_size
        hashes = seq.block_hashes[:num_full][num_kept:]
        places: list[HostBlockId | None] = []  # those on the host again, or on their way
        for index, source in enumerate(seq.disk_block_ids):
            found = pool.find(hashes[index : index + 1]) if index < len(hashes) else []
            places.append(found[0] if found else self._disk.target(source))
            if places[-1] is None and self._disk.is_storing(source):
                return FetchStatus.LATER
        there = [place for place in places if place is not None]
        pool.share(there)  # before others give up theirs
        num_missing = len(places) - len(there)
        if num_missing > pool.num_available and not (
            has_room and self._room.make_for_fetch(seq, num_missing)
        ):
            pool.drop(there)
            return FetchStatus.LATER
        padded = [*hashes, *[None] * (len(places) - len(hashes))]
        missing = [
            (source, block_hash)
            for source, block_hash, place in zip(seq.disk_block_ids, padded, places, strict=True)
            if place is None
        ]
        loading = iter(self._begin(seq, missing, there))
        seq.host_block_ids += tuple(next(loading) if p is None else p for p in places)
        if not self._awaited[seq]:
            self._come_back(seq)
        return FetchStatus.FETCHING

    def _begin(
        self, seq: Sequence, loads: Iterable[_Known], there: Iterable[HostBlockId] = ()
    ) -> list[HostBlockId]:
        """Take a sequence out of the queue, and let it wait for loads.

        Args:
            seq: It is in the queue, or about to be.
            loads: What it waits for; those under way already are shared.
            there: Host blocks that it holds, which may be targets of loads under way.

        Returns:
            The loads' host blocks; the sequence is a holder of each.
        """
        loads = list(loads)
        # Held before anything is allocated, which may evict what is found on either tier.
        self._disk.pool.share([source for source, _ in loads])
        targets = []
        for source, block_hash in loads:
            if (target := self._disk.target(source)) is None:
                target = self._tier.take_free()
                self._disk.load(source, target, block_hash)
            self._tier.pool.share([target])
            targets.append(target)
        self._disk.pool.drop([source for source, _ in loads])
        awaited = {block for block in (*targets, *there) if self._disk.is_loading_to(block)}
        if seq in self._queue:
            self._queue.remove(seq)
        seq.move(SeqStatus.FETCHING)
        self._awaited[seq] = awaited
        for target in awaited:
            self._waiters.setdefault(target, set()).add(seq)
        return targets

    # --- and back -------------------------------------------------------------------------------

    def answer(self, outcome: Result) -> None:
        """End disk moves; a sequence that waited for the last of its loads is queued again."""
        self._disk.answer(outcome)
        for block in map(DiskBlockId, outcome.failed_disk_block_ids.tolist()):
            for seq in self._room.spilled_to(block):
                self._give_up(seq)
        for target in map(HostBlockId, outcome.failed_host_block_ids.tolist()):
            for seq in self._pop_waiters(target):
                if seq.disk_block_ids:
                    self._give_up(seq)
                else:
                    self._tier.pool.drop([target])
                    seq.fetched_block_ids = tuple(b for b in seq.fetched_block_ids if b != target)
                    self._arrive(seq, target)
        for target in map(HostBlockId, outcome.loaded_host_block_ids.tolist()):
            for seq in self._pop_waiters(target):
                self._arrive(seq, target)

    def stop(self, seq: Sequence) -> None:
        """Stop waiting for a sequence's loads; they go on, for the cache."""
        for target in self._awaited.pop(seq):
            if (waiters := self._waiters.get(target)) is not None:
                waiters.discard(seq)
                if not waiters:
                    del self._waiters[target]

    def first_expired(self, now: float) -> Sequence | None:
        """Return a sequence with a deadline that has passed, if there is one."""
        for seq in self._awaited:
            if seq.request.deadline is not None and seq.request.deadline <= now:
                return seq
        return None

    def _pop_waiters(self, target: HostBlockId) -> list[Sequence]:
        return sorted(self._waiters.pop(target, ()), key=lambda seq: seq.seq_id)

    def _arrive(self, seq: Sequence, target: HostBlockId) -> None:
        self._awaited[seq].discard(target)
        if not self._awaited[seq]:
            self._come_back(seq)

    def _come_back(self, seq: Sequence) -> None:
        self.stop(seq)
        seq.move(SeqStatus.SWAPPED if seq.disk_block_ids else SeqStatus.WAITING)
        self._disk.pool.drop(seq.disk_block_ids)
        seq.disk_block_ids = ()
        self._queue.push(seq)

    def _give_up(self, seq: Sequence) -> None:
        """Let a swapped sequence that has lost a part of its KV compute it again."""
        if seq.status is SeqStatus.FETCHING:
            self._come_back(seq)
        self._room.give_up(seq)
