"""The blocks of one tier: which are held, which are free, which are findable by content.

A block's state is told by its reference count and whether it has a hash:

    ref_count > 0            held: by block tables, pins, steps in flight, swap-ins under way
    ref_count = 0, a hash    cached: findable, and evicted in order when no block is free
    ref_count = 0, no hash   free, or retired while its pool shrinks (below)

Free and cached blocks are *available*: they can be allocated. A held block may have a hash, too,
and is then shared by all that find it. A step is planned to write only
blocks that had one holder and no hash until then; a full block may be published, and shared, as
soon as its write is planned.

Free blocks at or beyond the *border* are allocated last, lowest first, so that what defragmentation
has emptied stays empty. At first no block is beyond it.

A pool can be resized. Before it shrinks, blocks from its new *end* on are taken out of use. Those
that are available, or become so, are *retired*: with neither holder nor hash, and never allocated.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Generic, NamedTuple, NewType, TypeVar, cast

import numpy as np
import numpy.typing as npt

from contract.hashing import BlockHash
from scheduler_svc.core.cache.eviction import Eviction, make_eviction_order
from scheduler_svc.core.errors import BrokenInvariantError
from scheduler_svc.core.handover.labels import NewLabels

DeviceBlockId = NewType("DeviceBlockId", int)
HostBlockId = NewType("HostBlockId", int)
DiskBlockId = NewType("DiskBlockId", int)

BlockIdT = TypeVar("BlockIdT", bound=int)


class PoolBooks(NamedTuple, Generic[BlockIdT]):
    """The tables of a pool, live; for reports and invariants, which only read them."""

    hashes: Sequence[BlockHash | None]
    """By block."""
    hash_to_block: Mapping[BlockHash, BlockIdT]
    cached: list[BlockIdT]
    """Not live: in the order of eviction, or in none."""
    free: Sequence[BlockIdT]
    """Below the border; the last is next."""
    free_beyond: Sequence[BlockIdT]
    border: int


class BlockPool(Generic[BlockIdT]):
    """Allocates, shares and takes back blocks; the one owner of their reference counts."""

    def __init__(
        self,
        num_blocks: int,
        block_id: Callable[[int], BlockIdT],
        on_evict: Callable[[BlockIdT, BlockHash], None] | None = None,
        eviction: Eviction = Eviction.LRU,
        labels: NewLabels | None = None,
    ) -> None:
        """`on_evict` is called with each cached block that is allocated, and its hash.

        `labels` gets each content that is published, even if another block has it, too.
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
        # A stack, so that low numbers are used first and again, and the pool's end stays empty.
        self._free = [block_id(b) for b in reversed(range(num_blocks))]
        self._free_beyond: list[BlockIdT] = []  # a heap

    @property
    def num_available(self) -> int:
        """Blocks that may be allocated: free and cached.

        While the pool shrinks, the blocks are subtracted to which the held blocks beyond the new
        end still have to move. The result is negative if there are too few of them.
        """
        num_available = len(self._free) + len(self._free_beyond) + len(self._cached)
        return num_available if self._end == self.num_blocks else num_available - self.num_leaving

    @property
    def num_cached(self) -> int:
        """Blocks that are not held and can still be found by hash."""
        return len(self._cached)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated without evicting one."""
        return len(self._free) + len(self._free_beyond)

    @property
    def books(self) -> PoolBooks[BlockIdT]:
        """Its tables; takes time in proportion to the cached blocks."""
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
        """Take `count` blocks, each with one holder and no hash: free ones, then cached, in order.

        Raises:
            BrokenInvariantError: Fewer are available; the caller looks at `num_available` first.
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
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[BlockIdT]) -> None:
        """Add a holder to each block, which is held or cached."""
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
        """Remove a holder from each block of a table, or of a table's end.

        The table's last blocks become available first, so they are evicted before the prefixes they
        continue, without which they could not be found.
        """
        if self._cached.minds_tables:
            hashes = (self._hashes[block] for block in reversed(blocks))
            self._cached.note_table([block_hash for block_hash in hashes if block_hash is not None])
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
        """Make held, full blocks findable; not those whose content another block has already."""
        known = self._hashes
        if any(map(known.__getitem__, blocks)):
            new = [i for i, block in enumerate(blocks) if known[block] is None]
            blocks, hashes = [blocks[i] for i in new], [hashes[i] for i in new]
        if self._labels is not None:
            self._labels.give(blocks, hashes)
        for block, block_hash in zip(blocks, hashes, strict=True):
            if self._hash_to_block.setdefault(block_hash, block) == block:
                known[block] = block_hash

    def forget(self, blocks: Iterable[BlockIdT]) -> None:
        """Make blocks unfindable, because their content is not to be trusted."""
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
        """Return the blocks of the longest prefix of `hashes` that is findable; changes nothing."""
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
        """Whether `block` is not held, and can still be found by hash."""
        return self._ref_counts[block] == 0 and self._hashes[block] is not None

    def set_border(self, border: BlockIdT) -> None:
        """Allocate free blocks below `border` first, lowest first, and those beyond it last."""
        is_free = np.zeros(self.num_blocks, np.bool_)
        is_free[self._free + self._free_beyond] = True
        free = cast("list[BlockIdT]", np.flatnonzero(is_free).tolist())
        num_below = bisect_left(free, border)
        self._border = border
        self._free = free[:num_below][::-1]
        self._free_beyond = free[num_below:]

    def allocate_before(self, block: BlockIdT) -> BlockIdT | None:
        """Take the next free block, with one holder, if its number is lower; else None."""
        if self._free and self._free[-1] < block:
            found = self._free.pop()
        elif not self._free and self._free_beyond and self._free_beyond[0] < block:
            found = heappop(self._free_beyond)
        else:
            return None
        self._ref_counts[found] = 1
        return found

    def exchange(self, one: BlockIdT, other: BlockIdT) -> None:
        """Exchange the numbers of two blocks, neither of them free.

        Holders, hash and place in the order of eviction go with the content. The caller moves the
        content, and tells the holders of each block its new number. A cached block that would go
        beyond the new end is lost.

        Raises:
            BrokenInvariantError: One is free: there is no content to move.
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
        """Blocks in the pool, without those that are being taken out of use."""
        return self._end

    @property
    def usable_ref_counts(self) -> npt.NDArray[np.int32]:
        """int32[num_usable]: the number of holders of each of these; a live view."""
        return self.ref_counts[: self._end]

    @property
    def num_leaving(self) -> int:
        """Held blocks that are being taken out of use; counted, block by block."""
        return int(np.count_nonzero(self.ref_counts[self._end :]))

    def retire_from(self, end: int) -> None:
        """Take blocks from `end` on out of use; `on_evict` is called with those that are cached.

        Held ones stay held, and are retired when the last holder drops them; their content is lost
        then.
        """
        self._end = end
        self._free = [block for block in self._free if block < end]
        self._free_beyond = sorted(block for block in self._free_beyond if block < end)
        cached = [(block_hash, self._hash_to_block[block_hash]) for block_hash in self._cached]
        for block_hash, block in reversed(cached):  # there may be room for few on the host
            if block >= end:
                self._cached.remove(block_hash)
                self._forget(block)
                if self._on_evict is not None:
                    self._on_evict(block, block_hash)

    def resize(self, num_blocks: int) -> None:
        """Set the number of blocks, all of them in use; those that come, or come back, are free.

        Raises:
            BrokenInvariantError: A block that would go is not retired.
        """
        if self.ref_counts[num_blocks:].any() or num_blocks < self._end:
            raise BrokenInvariantError(f"resize({num_blocks}) with blocks in use beyond")
        num_new = max(0, num_blocks - self.num_blocks)
        was_whole = self._border >= self.num_blocks
        # Not in place: there may be views of the counts.
        self._ref_counts = self._ref_counts[:num_blocks] + array("i", bytes(4 * num_new))
        self._hashes = self._hashes[:num_blocks] + [None] * num_new
        came = [b for b in range(self._end, num_blocks) if self._ref_counts[b] == 0]
        self.num_blocks = self._end = num_blocks
        self._free_beyond += map(self._block_id, came)
        border = num_blocks if was_whole else min(self._border, num_blocks)
        self.set_border(self._block_id(border))

    def _forget(self, block: BlockIdT) -> None:
        """Make a block that is neither held nor cached unfindable."""
        if (block_hash := self._hashes[block]) is not None:
            self._cached.forget(block_hash)
            del self._hash_to_block[block_hash]
            self._hashes[block] = None

    # --- after another scheduler ----------------------------------------------------------------

    def restore(
        self,
        tables: Iterable[Sequence[BlockIdT]],
        blocks: Sequence[BlockIdT],
        hashes: Sequence[BlockHash],
    ) -> None:
        """Take over what a pool's blocks hold, before anything is allocated.

        It is not known when each block was last used. So the blocks that were published last are
        evicted first, because a prefix is published before the blocks that continue it.

        Args:
            tables: Block tables, each of distinct blocks; each becomes a holder of its blocks.
            blocks: Blocks whose content is known, in the order in which they were published.
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
        """Whether a held block has one holder and no hash, so that the holder may write it."""
        return self._ref_counts[block] == 1 and self._hashes[block] is None
