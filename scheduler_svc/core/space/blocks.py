"""The blocks of one tier: which are held, which are free, and which can be found by hash.

A block's state follows from its reference count and whether it has a hash:

    ref_count > 0            held by sequences, pins, steps in flight, or copies in progress
    ref_count = 0, a hash    cached: the prefix cache finds it; evicted when no block is free
    ref_count = 0, no hash   free, or retired while its pool shrinks (see below)

Free and cached blocks are *available*: they can be allocated. A held block may have a hash, too;
then every sequence that finds the block shares it. A write to a block is planned only while the
block has one holder and no hash. If the write fills the block, the block may be published, and
shared, as soon as the write is planned.

Defragmentation empties all blocks whose number is the *border* or higher. Free blocks at or beyond
the border are allocated last, lowest number first, so that this range stays empty. At first no
block is beyond the border.

A pool can be resized. Before it shrinks, the blocks from its new *end* on are taken out of use. As
soon as such a block has no holder, it is *retired*: it loses its hash and is not allocated.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Generic, NamedTuple, NewType, TypeVar, cast

import numpy as np
import numpy.typing as npt

from contract.hashing import BlockHash
from scheduler_svc.core.interface.config import Eviction
from scheduler_svc.core.interface.errors import BrokenInvariantError
from scheduler_svc.core.space.eviction import make_eviction_order
from scheduler_svc.core.space.labels import NewLabels

DeviceBlockId = NewType("DeviceBlockId", int)
HostBlockId = NewType("HostBlockId", int)
DiskBlockId = NewType("DiskBlockId", int)

BlockIdT = TypeVar("BlockIdT", bound=int)


class PoolBooks(NamedTuple, Generic[BlockIdT]):
    """A pool's tables, for reports and invariants.

    Most of these tables are the pool's own objects, and change with the pool: read them before the
    pool changes, and do not write to them.
    """

    hashes: Sequence[BlockHash | None]
    """The hash of each block's content, indexed by block."""
    hash_to_block: Mapping[BlockHash, BlockIdT]
    cached: list[BlockIdT]
    """A copy of the list of cached blocks; under some eviction policies, in no particular order."""
    free: Sequence[BlockIdT]
    """Free blocks below `border`; the last block of the list is allocated next."""
    free_beyond: Sequence[BlockIdT]
    """Free blocks at or beyond `border`."""
    border: int
    """Defragmentation empties the blocks from this number on."""


class BlockPool(Generic[BlockIdT]):
    """Allocates, shares and frees blocks. Only this class changes their reference counts."""

    def __init__(
        self,
        num_blocks: int,
        block_id: Callable[[int], BlockIdT],
        on_evict: Callable[[BlockIdT, BlockHash], None] | None = None,
        eviction: Eviction = Eviction.LRU,
        labels: NewLabels | None = None,
    ) -> None:
        """Make a pool of free blocks.

        Args:
            num_blocks: Number of blocks in the pool.
            block_id: The function that makes a block id of this tier from a number.
            on_evict: Called with each cached block that gets evicted, and its hash.
            eviction: Decides which cached block is evicted first.
            labels: Receives the hash of every published block, even if another block has the same
                content.
        """
        self.num_blocks = num_blocks
        self._labels = labels
        self._on_evict = on_evict
        self._ref_counts = array("i", bytes(4 * num_blocks))
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._hash_to_block: dict[BlockHash, BlockIdT] = {}
        self._cached = make_eviction_order(eviction)
        self._border = num_blocks
        self._end = num_blocks
        self._block_id = block_id
        # A stack with low numbers on top, so that the end of the pool stays empty.
        self._free = [block_id(b) for b in reversed(range(num_blocks))]
        self._free_beyond: list[BlockIdT] = []  # a heap

    @property
    def num_available(self) -> int:
        """Number of blocks that can be allocated: the free and the cached ones.

        While the pool shrinks, each held block beyond the new end must move to an available block
        below the end. The blocks needed for these moves are subtracted, so the number may be
        negative.
        """
        num_available = len(self._free) + len(self._free_beyond) + len(self._cached)
        return num_available if self._end == self.num_blocks else num_available - self.num_leaving

    @property
    def num_cached(self) -> int:
        """Number of blocks that have no holder but can still be found by hash."""
        return len(self._cached)

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated without an eviction."""
        return len(self._free) + len(self._free_beyond)

    @property
    def books(self) -> PoolBooks[BlockIdT]:
        """The pool's tables; reading this takes time in proportion to the cached blocks."""
        return PoolBooks(
            hashes=self._hashes,
            hash_to_block=self._hash_to_block,
            cached=[self._hash_to_block[block_hash] for block_hash in self._cached],
            free=self._free,
            free_beyond=self._free_beyond,
            border=self._border,
        )

    def ref_count(self, block: BlockIdT) -> int:
        """Return the number of holders of `block`."""
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[BlockIdT]:
        """Take `count` blocks: free ones first, then cached ones in the order of eviction.

        Each block has one holder and no hash afterwards.

        Raises:
            BrokenInvariantError: Fewer blocks are available; check `num_available` before the call.
        """
        num_available = self.num_free + self.num_cached
        if count > num_available:
            raise BrokenInvariantError(f"allocate({count}) with {num_available} available blocks")
        num_left = max(0, len(self._free) - count)
        blocks = self._free[num_left:]
        blocks.reverse()
        del self._free[num_left:]
        while len(blocks) < count and self._free_beyond:
            blocks.append(heappop(self._free_beyond))
        while len(blocks) < count:
            block_hash = self._cached.evict()
            block = self._hash_to_block.pop(block_hash)
            self._hashes[block] = None
            blocks.append(block)
            if self._on_evict is not None:
                self._on_evict(block, block_hash)
        counts = self._ref_counts
        for block in blocks:
            counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[BlockIdT]) -> None:
        """Add a holder to each block; every block must be held or cached."""
        for block in blocks:
            block_hash = self._hashes[block]
            if self._ref_counts[block] == 0:
                if block_hash is None:
                    raise BrokenInvariantError(f"share of free block {block}")
                self._cached.remove(block_hash)
            if block_hash is not None:
                self._cached.hit(block_hash)
            self._ref_counts[block] += 1

    def drop(self, blocks: Sequence[BlockIdT]) -> None:
        """Remove a holder from each of `blocks`, which are in the order of their block table.

        The last of `blocks` become available first, so they are evicted first. This order is best
        because a block cannot be found without the blocks that precede it.
        """
        if self._cached.uses_tables:  # the order of eviction depends on which blocks continue which
            hashes = (self._hashes[block] for block in reversed(blocks))
            known = [block_hash for block_hash in hashes if block_hash is not None]
            self._cached.on_table_dropped(known)
        for block in reversed(blocks):
            count = self._ref_counts[block] - 1
            if count < 0:
                raise BrokenInvariantError(f"drop of free block {block}")
            self._ref_counts[block] = count
            if count == 0:
                if block >= self._end:
                    self._forget(block)
                elif (block_hash := self._hashes[block]) is not None:
                    self._cached.add(block_hash)
                elif block < self._border:
                    self._free.append(block)
                else:
                    heappush(self._free_beyond, block)

    def publish(self, blocks: Sequence[BlockIdT], hashes: Sequence[BlockHash]) -> None:
        """Let held full blocks be found by hash, unless other blocks have the same hash already."""
        known, hash_to_block = self._hashes, self._hash_to_block
        if any(map(known.__getitem__, blocks)):
            new = [i for i, block in enumerate(blocks) if known[block] is None]
            blocks, hashes = [blocks[i] for i in new], [hashes[i] for i in new]
        if self._labels is not None:
            self._labels.give(blocks, hashes)
        for block, block_hash in zip(blocks, hashes, strict=True):
            if hash_to_block.setdefault(block_hash, block) == block:
                known[block] = block_hash

    def forget(self, blocks: Iterable[BlockIdT]) -> None:
        """Remove the hashes of blocks whose content may be wrong, so that they are not found."""
        blocks = list(blocks)
        if self._labels is not None:
            self._labels.forget({*blocks})
        for block in blocks:
            if (block_hash := self._hashes[block]) is None:
                continue
            if self._ref_counts[block] == 0:
                self._cached.remove(block_hash)
                if block < self._border:
                    self._free.append(block)
                else:
                    heappush(self._free_beyond, block)
            self._cached.forget(block_hash)
            del self._hash_to_block[block_hash]
            self._hashes[block] = None

    def find(self, hashes: Iterable[BlockHash]) -> list[BlockIdT]:
        """Return the blocks of `hashes`, up to the first hash without a block; change nothing."""
        blocks = []
        for block_hash in hashes:
            block = self._hash_to_block.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    # --- defragmentation ------------------------------------------------------------------------

    @property
    def ref_counts(self) -> npt.NDArray[np.int32]:
        """int32[num_blocks]: the number of holders of each block; a live view."""
        counts = np.frombuffer(self._ref_counts, np.int32)
        counts.flags.writeable = False
        return counts

    def is_cached(self, block: BlockIdT) -> bool:
        """Whether `block` has no holder but can still be found by hash."""
        return self._ref_counts[block] == 0 and self._hashes[block] is not None

    def set_border(self, border: BlockIdT) -> None:
        """From now on allocate free blocks below `border` first, and the other free blocks last."""
        is_free = np.zeros(self.num_blocks, np.bool_)
        is_free[self._free + self._free_beyond] = True
        free = cast("list[BlockIdT]", np.flatnonzero(is_free).tolist())
        num_below = bisect_left(free, border)
        self._border = border
        self._free = free[:num_below][::-1]
        self._free_beyond = free[num_below:]

    def allocate_before(self, block: BlockIdT) -> BlockIdT | None:
        """Allocate the next free block if its number is lower than `block`; else return None."""
        if self._free and self._free[-1] < block:
            found = self._free.pop()
        elif not self._free and self._free_beyond and self._free_beyond[0] < block:
            found = heappop(self._free_beyond)
        else:
            return None
        self._ref_counts[found] = 1
        return found

    def exchange(self, one: BlockIdT, other: BlockIdT) -> None:
        """Exchange the numbers of two blocks; neither may be free.

        The holders, the hash and the position in the order of eviction stay with the content. The
        caller moves the content and updates the block tables. If the pool is shrinking and a cached
        block would get a number beyond the new end, the content of this block is lost.

        Raises:
            BrokenInvariantError: One of the blocks is free and has no content to move.
        """
        for block in (one, other):
            if self._ref_counts[block] == 0 and self._hashes[block] is None:
                raise BrokenInvariantError(f"exchange of free block {block}")
        counts, hashes = self._ref_counts, self._hashes
        counts[one], counts[other] = counts[other], counts[one]
        hashes[one], hashes[other] = hashes[other], hashes[one]
        for block in (one, other):
            if (block_hash := self._hashes[block]) is not None:
                self._hash_to_block[block_hash] = block
            if block >= self._end and counts[block] == 0:
                self._cached.remove(cast("BlockHash", block_hash))
                self._forget(block)
        if self._labels is not None:
            self._labels.exchange(one, other)

    # --- another size ---------------------------------------------------------------------------

    @property
    def num_usable(self) -> int:
        """Number of blocks in the pool, except blocks that are being taken out of use."""
        return self._end

    @property
    def usable_ref_counts(self) -> npt.NDArray[np.int32]:
        """int32[num_usable]: the number of holders of each usable block; a live view."""
        return self.ref_counts[: self._end]

    @property
    def num_leaving(self) -> int:
        """Number of held blocks that are being taken out of use, counted on each access."""
        return int(np.count_nonzero(self.ref_counts[self._end :]))

    def retire_from(self, end: int) -> None:
        """Take the blocks from number `end` on out of use, and evict the cached ones among them.

        A held block stays held until its last holder drops it. Then the block is retired, and its
        content is lost.
        """
        self._end = end
        self._free = [block for block in self._free if block < end]
        self._free_beyond = sorted(block for block in self._free_beyond if block < end)
        cached = [(block_hash, self._hash_to_block[block_hash]) for block_hash in self._cached]
        # The host may have room for only a few, so the last blocks in eviction order are demoted
        # first.
        for block_hash, block in reversed(cached):
            if block >= end:
                self._cached.remove(block_hash)
                self._forget(block)
                if self._on_evict is not None:
                    self._on_evict(block, block_hash)

    def resize(self, num_blocks: int) -> None:
        """Set the number of blocks and use all of them; new and formerly retired blocks are free.

        Raises:
            BrokenInvariantError: A block beyond the new size is still in use.
        """
        if self.ref_counts[num_blocks:].any() or num_blocks < self._end:
            raise BrokenInvariantError(f"resize({num_blocks}) with blocks in use beyond")
        num_new = max(0, num_blocks - self.num_blocks)
        was_whole = self._border >= self.num_blocks
        # Make a new array, because callers may hold views of the old one.
        self._ref_counts = self._ref_counts[:num_blocks] + array("i", bytes(4 * num_new))
        self._hashes = self._hashes[:num_blocks] + [None] * num_new
        came = [b for b in range(self._end, num_blocks) if self._ref_counts[b] == 0]
        self.num_blocks = self._end = num_blocks
        self._free_beyond += map(self._block_id, came)
        border = num_blocks if was_whole else min(self._border, num_blocks)
        self.set_border(self._block_id(border))

    def _forget(self, block: BlockIdT) -> None:
        """Remove the block's hash, if it has one.

        The block has no holders, and is not in `_cached`.
        """
        if (block_hash := self._hashes[block]) is not None:
            self._cached.forget(block_hash)
            del self._hash_to_block[block_hash]
            self._hashes[block] = None

    # --- before the first use -------------------------------------------------------------------

    def find_in(self, table: dict[BlockHash, BlockIdT]) -> None:
        """Keep the map from hash to block in `table`, so that the table's owner sees each change.

        `table` must be empty.
        """
        self._hash_to_block = table

    def restore(
        self,
        tables: Iterable[Sequence[BlockIdT]],
        blocks: Sequence[BlockIdT],
        hashes: Sequence[BlockHash],
    ) -> None:
        """Take over the contents of blocks from an earlier scheduler, before any allocation.

        The times of last use are unknown. So the blocks that were published last are evicted first;
        a prefix, which is published before the blocks that continue it, is evicted after them.

        Args:
            tables: Block tables. Each table counts as one holder of each of its blocks, so a table
                may not name a block twice.
            blocks: Blocks with known content, in the order in which they were published.
            hashes: Parallel to `blocks`.
        """
        for block in (block for table in tables for block in table):
            self._ref_counts[block] += 1
        for block, block_hash in zip(blocks, hashes, strict=True):
            if self._hashes[block] is None and block_hash not in self._hash_to_block:
                self._hashes[block] = block_hash
                self._hash_to_block[block_hash] = block
        for block in reversed(self._hash_to_block.values()):
            if self._ref_counts[block] == 0:
                self._cached.add(cast("BlockHash", self._hashes[block]))
        self._free = [b for b in self._free if self._ref_counts[b] == 0 and not self._hashes[b]]

    def is_writable(self, block: BlockIdT) -> bool:
        """Whether the holder of a restored block may write to it: it has one holder and no hash."""
        return self._ref_counts[block] == 1 and self._hashes[block] is None
