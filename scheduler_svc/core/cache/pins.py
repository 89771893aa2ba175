"""Prompts' blocks that stay in the prefix cache for a time, whatever else is evicted.

A pin is a reference to a device block. Pins together hold at most a share of the blocks, and when a
sequence could not run at all otherwise, pins are given up, those that would end first in front.

The worker is sent the hashes of what is pinned, so that a later scheduler can restore the pins that
its share has room for. It is not sent those that end early: a later scheduler may have room.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from contract.hashing import BlockHash
from scheduler_svc.core.blocks import BlockPool, DeviceBlockId
from scheduler_svc.core.cache.marked_heap import MarkedHeap
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import Pinned
from scheduler_svc.core.sequence import RUNNING
from scheduler_svc.core.sequence import Sequence as Seq


class Pins:
    """The pinned blocks, and when each ends; the one owner of the references that pins hold."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool[DeviceBlockId]) -> None:
        self._pool = pool
        self._block_size = config.block_size
        self._max_share = config.max_pinned_share
        self._ends: dict[DeviceBlockId, tuple[float, int]] = {}  # and the block's place, negative
        self._by_end: MarkedHeap[DeviceBlockId] = MarkedHeap()
        self._loading: list[tuple[Seq, float]] = []  # to be pinned, and until when
        self._pinned: tuple[Pinned, ...] = ()  # their sources have not heard of it yet
        self._unsent: list[tuple[BlockHash, float]] = []  # the worker has not heard of it yet
        self._next_end = float("inf")  # no pin ends before that

    @property
    def _max_blocks(self) -> int:
        return int(self._max_share * self._pool.num_usable)

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, block: DeviceBlockId) -> bool:
        return block in self._ends

    def __iter__(self) -> Iterator[DeviceBlockId]:
        return iter(self._ends)

    @property
    def ends(self) -> Mapping[DeviceBlockId, tuple[float, int]]:
        """When each pin ends, and its order among those that end together."""
        return self._ends

    @property
    def by_end(self) -> MarkedHeap[DeviceBlockId]:
        """The pinned blocks, those that end first in front; not to be changed."""
        return self._by_end

    def on_prompt_computed(self, seq: Seq, now: float) -> None:
        """Pin the full blocks of a prompt, if its request wants it, as many as there is room for.

        Those of a prompt that was swapped in are pinned by `on_loads_confirmed`. Of a search, its
        leader's count.
        """
        is_leader = seq.group is None or seq is seq.group.leader
        if seq.request.cache_pin_s is not None and is_leader:
            self._loading.append((seq, now + seq.request.cache_pin_s))
            self.on_loads_confirmed()

    def on_loads_confirmed(self) -> None:
        """Pin the prompts that waited for their swap-ins to be known to have succeeded."""
        waiting, self._loading = self._loading, []
        for seq, until in waiting:
            if seq.status not in RUNNING:
                continue
            if seq.loading_block_ids:
                self._loading.append((seq, until))
            else:
                hashes = seq.block_hashes[: seq.num_prompt_tokens // self._block_size]
                num_tokens = self._pin(hashes, until) * self._block_size
                self._pinned += (Pinned(seq.request.source, seq.seq_key, num_tokens),)

    def take_pinned(self) -> tuple[Pinned, ...]:
        """Return which prompts were pinned since the last call."""
        pinned, self._pinned = self._pinned, ()
        return pinned

    def take_unsent(self, now: float) -> tuple[tuple[BlockHash, float], ...]:
        """Return the hashes pinned since the last call, and for how many seconds."""
        if not self._unsent:  # as in almost every step
            return ()
        untold, self._unsent = self._unsent, []
        return tuple((name, until - now) for name, until in untold if until > now)

    def restore(self, pins: Iterable[tuple[BlockHash, float]], now: float) -> None:
        """Restore the pins of the scheduler before, as far as blocks are cached and there is room.

        Args:
            pins: Hashes and seconds from now; those of a prompt from its beginning.
            now: The time.
        """
        for place, (name, left_s) in enumerate(pins):
            for block in self._pool.find([name]):
                self._pool.share([block])
                self._set_end(block, now + left_s, -place)
        self.keep_within_share()

    def expire(self, now: float) -> None:
        """Unpin blocks whose time is over."""
        if now < self._next_end:
            return
        while (first := self._by_end.first()) is not None and first[0][0] <= now:
            self._let_go(first[1])
        self._next_end = first[0][0] if first is not None else float("inf")

    def give_up(self, count: int) -> bool:
        """Unpin up to `count` blocks, those that would end first; return whether there were any.

        A block does not become available if it has other holders.
        """
        any_pinned = bool(self._ends)
        for _ in range(count):
            if (first := self._by_end.first()) is None:
                break
            self._let_go(first[1])
        return any_pinned

    def keep_within_share(self) -> None:
        """Unpin what is beyond the share of the pool, which has become smaller."""
        self.give_up(len(self._ends) - self._max_blocks)

    def forget(self, blocks: Iterable[DeviceBlockId]) -> None:
        """Unpin those of `blocks` that are pinned: their content is not to be trusted."""
        for block in blocks:
            if block in self._ends:
                self._let_go(block)

    def rename(self, src: DeviceBlockId, dst: DeviceBlockId) -> None:
        """Follow a pinned block to its new number."""
        end, place = self._ends.pop(src)
        self._by_end.discard(src)
        self._set_end(dst, end, place)

    def _pin(self, hashes: Sequence[BlockHash], until: float) -> int:
        """Pin the blocks of the first of `hashes`, or prolong their pins; return how many."""
        blocks = self._pool.find(hashes)
        for index, block in enumerate(blocks):
            if (old := self._ends.get(block)) is None:
                if len(self._ends) >= self._max_blocks:
                    return index
                self._pool.share([block])
            elif old[0] >= until:
                continue
            else:
                self._by_end.discard(block)
            # A prefix ends no sooner than what continues it, and among equals after it.
            self._set_end(block, until, -index)
            self._unsent.append((hashes[index], until))
        return len(blocks)

    def _set_end(self, block: DeviceBlockId, until: float, place: int) -> None:
        self._next_end = min(self._next_end, until)
        self._ends[block] = until, place
        self._by_end.push((until,), block, place)

    def _let_go(self, block: DeviceBlockId) -> None:
        del self._ends[block]
        self._by_end.discard(block)
        self._pool.drop([block])
