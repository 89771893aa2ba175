"""The order in which a pool evicts its cached blocks when no block is free.

Blocks are named by the hash of their content, so that one may change its number and keep its place.

A block is of no use without the prefix it continues, so in each order the last blocks of a table
are evicted before those ahead of them:

    lru    when a table is dropped, its last blocks become free first
    lfu    each hit of a block is a hit of its prefix, too, which so has at least as many; among
           equals as lru
    fifo   a prefix counts as no older than the youngest of its continuations (`note_table`);
           among equals as lru
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Protocol

from contract.hashing import BlockHash
from scheduler_svc.core.cache.marked_heap import MarkedHeap


class Eviction(StrEnum):
    """Which cached block goes first."""

    LRU = "lru"
    """The one whose last holder left longest ago."""
    LFU = "lfu"
    """The one that was hit least often since it was published; among equals as LRU."""
    FIFO = "fifo"
    """The one that became cached first, whatever has hit it since."""


class EvictionOrder(Protocol):
    """The cached blocks of one pool, and ranks of those that are held."""

    minds_tables: bool
    """Whether `note_table` has an effect; if not, the caller need not call it."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[BlockHash]: ...

    def add(self, block_hash: BlockHash) -> None:
        """Add a block that is not held any more."""

    def remove(self, block_hash: BlockHash) -> None:
        """Remove a block that is cached."""

    def evict(self) -> BlockHash:
        """Remove the first block in order, and forget it; there must be one."""

    def hit(self, block_hash: BlockHash) -> None:
        """Called when a block that is held gets one more holder."""

    def forget(self, block_hash: BlockHash) -> None:
        """Called when a block that is not cached can no longer be found."""

    def note_table(self, hashes: Iterable[BlockHash]) -> None:
        """Called with hashes of which each continues the one after it, cached or held."""


def make_eviction_order(eviction: Eviction) -> EvictionOrder:
    """Make an empty one."""
    match eviction:
        case Eviction.LRU:
            return Lru()
        case Eviction.LFU:
            return Lfu()
        case Eviction.FIFO:
            return Fifo()


class Lru(OrderedDict[BlockHash, None]):
    """By when they became free: an ordered dict, and as fast."""

    minds_tables = False

    def add(self, block_hash: BlockHash) -> None:
        """Put it at the end."""
        self[block_hash] = None

    def remove(self, block_hash: BlockHash) -> None:
        """Take it out."""
        del self[block_hash]

    def evict(self) -> BlockHash:
        """Take out the first."""
        return self.popitem(last=False)[0]

    def hit(self, block_hash: BlockHash) -> None:
        """It does not change the order."""

    def forget(self, block_hash: BlockHash) -> None:
        """It has no memory."""

    def note_table(self, hashes: Iterable[BlockHash]) -> None:
        """It does not change the order."""


class _Ranked:
    """By a number of each block, and among equals by when they became free."""

    def __init__(self) -> None:
        self._order: MarkedHeap[BlockHash] = MarkedHeap()
        self._ranks: dict[BlockHash, int] = {}
        """Ranks that differ from 0, of all findable blocks, held ones included."""

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._order)

    def add(self, block_hash: BlockHash) -> None:
        self._order.push((self._ranks.get(block_hash, 0),), block_hash)

    def remove(self, block_hash: BlockHash) -> None:
        self._order.discard(block_hash)

    def evict(self) -> BlockHash:
        first = self._order.first()
        assert first is not None
        block_hash = first[1]
        self._order.discard(block_hash)
        self.forget(block_hash)
        return block_hash

    def forget(self, block_hash: BlockHash) -> None:
        self._ranks.pop(block_hash, None)


class Lfu(_Ranked):
    """By how often they were hit."""

    minds_tables = False

    def hit(self, block_hash: BlockHash) -> None:
        """Count it."""
        self._ranks[block_hash] = self._ranks.get(block_hash, 0) + 1

    def note_table(self, hashes: Iterable[BlockHash]) -> None:
        """It does not change the order."""


class Fifo(_Ranked):
    """By the table with which they, or what continues them, first became free."""

    minds_tables = True

    def __init__(self) -> None:
        super().__init__()
        self._num_tables = 0

    def hit(self, block_hash: BlockHash) -> None:
        """It does not change the order."""

    def note_table(self, hashes: Iterable[BlockHash]) -> None:
        """Number those that are new, and let none be older than what continues it."""
        self._num_tables += 1
        rank = 0
        for block_hash in hashes:
            rank = max(rank, self._ranks.get(block_hash, self._num_tables))
            self._ranks[block_hash] = rank  # a table's blocks are held: none is in the order yet
