"""Prompts' blocks that stay in the prefix cache for a time, whatever else is evicted.

A pin is a reference to a device block. It is a promise as good as there is room: pins together hold
a share of the blocks at most, and when a sequence could not run at all otherwise, they go, those
that would end first before the others.
"""

from collections.abc import Iterable, Sequence

from scheduler_svc.core.block_pool import BlockPool, DeviceBlockId
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.marked_heap import MarkedHeap
from scheduler_svc.core.plan import Pinned
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
        self._news: tuple[Pinned, ...] = ()  # their sources have not heard of it yet
        self._next_end = float("inf")  # no pin ends before that

    @property
    def _max_blocks(self) -> int:
        return int(self._max_share * self._pool.num_usable)

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, block: DeviceBlockId) -> bool:
        return block in self._ends

    def prompt_computed(self, seq: Seq, now: float) -> None:
        """Pin the full blocks of a prompt, if its request wants it, as many as there is room for.

        Those of a prompt that was swapped in are pinned by `loads_confirmed`. Of a search, its
        leader's count.
        """
        is_leader = seq.group is None or seq is seq.group.leader
        if seq.request.cache_pin_s is not None and is_leader:
            self._loading.append((seq, now + seq.request.cache_pin_s))
            self.loads_confirmed()

    def loads_confirmed(self) -> None:
        """Pin the prompts that waited for their swap-ins to be known to have succeeded."""
        waiting, self._loading = self._loading, []
        for seq, until in waiting:
            if seq.status not in RUNNING:
                continue
            if seq.loading_block_ids:
                self._loading.append((seq, until))
            else:
                hashes = seq.block_hashes[: seq.num_prompt_tokens // self._block_size]
                num_tokens = self._pin(self._pool.find(hashes), until) * self._block_size
                self._news += (Pinned(seq.request.source, seq.seq_key, num_tokens),)

    def take_news(self) -> tuple[Pinned, ...]:
        """Return which prompts were pinned since the last call."""
        news, self._news = self._news, ()
        return news

    def expire(self, now: float) -> None:
        """Let go of what has been pinned for its time."""
        if now < self._next_end:
            return
        while (first := self._by_end.first()) is not None and first[0][0] <= now:
            self._let_go(first[1])
        self._next_end = first[0][0] if first is not None else float("inf")

    def give_up(self, count: int) -> bool:
        """Let go of up to `count` blocks, those that would end first; say whether there were any.

        The blocks are not free if someone else holds them.
        """
        any_pinned = bool(self._ends)
        for _ in range(count):
            if (first := self._by_end.first()) is None:
                break
            self._let_go(first[1])
        return any_pinned

    def keep_within_share(self) -> None:
        """Let go of what is more than the share of the pool, which has become smaller."""
        self.give_up(len(self._ends) - self._max_blocks)

    def forget(self, blocks: Iterable[DeviceBlockId]) -> None:
        """Let go of those of `blocks` that are pinned: their content is not to be trusted."""
        for block in blocks:
            if block in self._ends:
                self._let_go(block)

    def rename(self, src: DeviceBlockId, dst: DeviceBlockId) -> None:
        """Follow a pinned block to its new number."""
        end, place = self._ends.pop(src)
        self._by_end.discard(src)
        self._ends[dst] = end, place
        self._by_end.push((end,), dst, place)

    def _pin(self, blocks: Sequence[DeviceBlockId], until: float) -> int:
        """Pin the first of `blocks`, or pin them for longer; return how many there was room for."""
        self._next_end = min(self._next_end, until)
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
            self._ends[block] = until, -index
            self._by_end.push((until,), block, -index)
        return len(blocks)

    def _let_go(self, block: DeviceBlockId) -> None:
        del self._ends[block]
        self._by_end.discard(block)
        self._pool.drop([block])
