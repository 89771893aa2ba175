"""The order in which a pool evicts its cached blocks when no block is free.

Blocks are identified by the hash of their content, so a block keeps its position in the order when
its number changes.

A block cannot be found without the blocks before it, so every order evicts the last blocks of a
block table first:

    lru    When a table is dropped, its last blocks become available first.
    lfu    A hit of a block is also a hit of all blocks before it, so earlier blocks have at least
           as many hits. Ties are broken as in lru.
    fifo   When a table is dropped, a block that is older than a block behind it in the table
           becomes as young as that block. Ties are broken as in lru.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Protocol

from contract.hashing import BlockHash
from scheduler_svc.core.interface.config import Eviction
from scheduler_svc.core.space.marked_heap import MarkedHeap


class EvictionOrder(Protocol):
    """The cached blocks of one pool in the order of eviction.

    Held blocks are not in the order. A held block gets into the order when its last holder drops
    it, so its rank must be known before: `Lfu` also counts the hits of held blocks, and `Fifo`
    ranks the blocks of a dropped table while they are still held.
    """

    uses_tables: bool
    """Whether the caller must call `on_table_dropped`."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[BlockHash]: ...

    def add(self, block_hash: BlockHash) -> None:
        """Add a block that has lost its last holder."""

    def remove(self, block_hash: BlockHash) -> None:
        """Remove a cached block."""

    def evict(self) -> BlockHash:
        """Remove and return the block to evict first; there must be a cached block."""

    def hit(self, block_hash: BlockHash) -> None:
        """Called when a block with a hash gets another holder."""

    def forget(self, block_hash: BlockHash) -> None:
        """Called when a block that is not in the order loses its hash."""

    def on_table_dropped(self, hashes: Iterable[BlockHash]) -> None:
        """Called with the hashes of a block table that is dropped, last block first."""


def make_eviction_order(eviction: Eviction) -> EvictionOrder:
    match eviction:
        case Eviction.LRU:
            return Lru()
        case Eviction.LFU:
            return Lfu()
        case Eviction.FIFO:
            return Fifo()


class Lru(OrderedDict[BlockHash, None]):
    """Orders blocks by the time at which they became cached.

    `OrderedDict` is fast enough for use in every step.
    """

    uses_tables = False

    def add(self, block_hash: BlockHash) -> None:
        self[block_hash] = None

    def remove(self, block_hash: BlockHash) -> None:
        del self[block_hash]

    def evict(self) -> BlockHash:
        return self.popitem(last=False)[0]

    def hit(self, block_hash: BlockHash) -> None:
        """Do nothing: hits do not change this order."""

    def forget(self, block_hash: BlockHash) -> None:
        """Do nothing: held blocks have no rank."""

    def on_table_dropped(self, hashes: Iterable[BlockHash]) -> None:
        """Do nothing: tables do not change this order."""


class _Ranked:
    """Orders blocks by rank, lowest first; blocks of equal rank by when they became cached."""

    def __init__(self) -> None:
        self._order: MarkedHeap[BlockHash] = MarkedHeap()
        self._ranks: dict[BlockHash, int] = {}
        """The ranks of cached and held blocks, by hash. A block that is missing has rank 0."""

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
    """Orders blocks by number of hits, fewest first."""

    uses_tables = False

    def hit(self, block_hash: BlockHash) -> None:
        self._ranks[block_hash] = self._ranks.get(block_hash, 0) + 1

    def on_table_dropped(self, hashes: Iterable[BlockHash]) -> None:
        """Do nothing: tables do not change this order."""


class Fifo(_Ranked):
    """Orders blocks by age, oldest first.

    A block's age counts from the first time that a block table with this block is dropped. When a
    table is dropped, a block that is older than a block behind it in the table becomes as young as
    that block.
    """

    uses_tables = True

    def __init__(self) -> None:
        super().__init__()
        self._num_tables = 0

    def hit(self, block_hash: BlockHash) -> None:
        """Do nothing: hits do not change this order."""

    def on_table_dropped(self, hashes: Iterable[BlockHash]) -> None:
        """Rank the blocks of a table that is dropped.

        Blocks without a rank get a new rank, the highest. A block that then ranks below a block
        behind it in the table gets that block's rank.
        """
        self._num_tables += 1
        rank = 0
        for block_hash in hashes:
            rank = max(rank, self._ranks.get(block_hash, self._num_tables))
            # The table's blocks are still held, so they are not in the order.
            self._ranks[block_hash] = rank
