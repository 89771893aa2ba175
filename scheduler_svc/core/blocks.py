"""The blocks of one tier: who may write which, which are free, which are findable by content.

A block is in one of three states, told by its reference count and whether it has a hash:

    ref_count > 0            held: by block tables, pins, steps in flight, swap-ins under way
    ref_count = 0, a hash    cached: findable, and evicted in order when blank ones run out
    ref_count = 0, no hash   blank

Cached and blank blocks are both *free*. A held block may have a hash too; it is then shared by
whoever finds it. Only a block with one holder and no hash is ever written.

Blank blocks at or beyond the *border* are given last, lowest first, so that what defragmentation
has emptied stays empty. At first there are none.

A pool can be resized. Before it shrinks, blocks from its *end to be* on are taken out of use: those
that are free, or become so, are *retired*: with neither holder nor hash, and given to nobody.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Generic, NewType, TypeVar, cast

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
        """`on_evict` hears of each cached block that `allocate` gives away, and of its hash.

        `labels` hears of each content that is published, even if another block has it, too.
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
        self._blank = [block_id(b) for b in reversed(range(num_blocks))]
        self._blank_beyond: list[BlockIdT] = []  # a heap

    @property
    def num_free(self) -> int:
        """Blocks that may be taken: blank and cached.

        Less those into which held blocks from the end to be on have to go; if these are too many it
        is negative.
        """
        num_free = len(self._blank) + len(self._blank_beyond) + len(self._cached)
        return num_free if self._end == self.num_blocks else num_free - self.num_leaving

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and that can still be found by hash."""
        return len(self._cached)

    @property
    def num_blank(self) -> int:
        """Blocks that `allocate` can give without evicting one."""
        return len(self._blank) + len(self._blank_beyond)

    def ref_count(self, block: BlockIdT) -> int:
        """Return how many hold `block`."""
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[BlockIdT]:
        """Take `count` blocks, each with one holder and no hash: blank, then cached, in order.

        Raises:
            BrokenInvariantError: There are not as many; the caller looks at `num_free` first.
        """
        num_free = self.num_blank + self.num_cached
        if count > num_free:
            raise BrokenInvariantError(f"allocate({count}) with {num_free} free blocks")
        num_left = max(0, len(self._blank) - count)
        blocks = self._blank[num_left:]
        blocks.reverse()
        del self._blank[num_left:]
        while len(blocks) < count and self._blank_beyond:
            blocks.append(heappop(self._blank_beyond))
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
                    raise BrokenInvariantError(f"share of blank block {block}")
                self._cached.remove(block_hash)
            if block_hash is not None:
                self._cached.hit(block_hash)
            self._ref_counts[block] += 1

    def drop(self, blocks: Sequence[BlockIdT]) -> None:
        """Remove a holder from each block of a table, or of a table's end.

        The table's last blocks become free first, so they are evicted before the prefixes they
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
                    self._blank.append(block)
                else:
                    heappush(self._blank_beyond, block)

    def publish(self, blocks: Sequence[BlockIdT], hashes: Sequence[BlockHash]) -> None:
        """Make held, full blocks findable. If another block has one's content, that one stays."""
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
                    self._blank.append(block)
                else:
                    heappush(self._blank_beyond, block)
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
        """int32[num_blocks]: how many hold each block; a view that follows what happens."""
        counts = np.frombuffer(self._ref_counts, np.int32)
        counts.flags.writeable = False
        return counts

    def is_cached(self, block: BlockIdT) -> bool:
        """Whether nobody holds `block`, and it can still be found by hash."""
        return self._ref_counts[block] == 0 and self._hashes[block] is not None

    def set_border(self, border: BlockIdT) -> None:
        """Give blank blocks below `border` first, lowest first, and those beyond it last."""
        is_blank = np.zeros(self.num_blocks, np.bool_)
        is_blank[self._blank + self._blank_beyond] = True
        blank = cast("list[BlockIdT]", np.flatnonzero(is_blank).tolist())
        num_below = bisect_left(blank, border)
        self._border = border
        self._blank = blank[:num_below][::-1]
        self._blank_beyond = blank[num_below:]

    def allocate_before(self, block: BlockIdT) -> BlockIdT | None:
        """Take the next blank block, with one holder, if its number is lower; else None."""
        if self._blank and self._blank[-1] < block:
            found = self._blank.pop()
        elif not self._blank and self._blank_beyond and self._blank_beyond[0] < block:
            found = heappop(self._blank_beyond)
        else:
            return None
        self._ref_counts[found] = 1
        return found

    def exchange(self, one: BlockIdT, other: BlockIdT) -> None:
        """Let two blocks, neither of them blank, change numbers.

        Holders, hash and place in the order of eviction go with the content, which the caller has
        moved; so have the holders of each to learn its new number. What is cached, and goes beyond
        the end to be, is lost.

        Raises:
            BrokenInvariantError: One is blank: there is no content to move.
        """
        for block in (one, other):
            if self._ref_counts[block] == 0 and self._hashes[block] is None:
                raise BrokenInvariantError(f"exchange of blank block {block}")
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
        """Blocks that there are, without those that are being taken out of use."""
        return self._end

    @property
    def usable_ref_counts(self) -> npt.NDArray[np.int32]:
        """How many hold each of those, int32[num_usable]; a view, as `ref_counts`."""
        return self.ref_counts[: self._end]

    @property
    def num_leaving(self) -> int:
        """Held blocks that are being taken out of use; takes time in proportion to what goes."""
        return int(np.count_nonzero(self.ref_counts[self._end :]))

    def retire_from(self, end: int) -> None:
        """Take blocks from `end` on out of use; `on_evict` hears of those that are cached.

        Those that are held go on being so, and are retired when they become free; what they hold
        is then lost.
        """
        self._end = end
        self._blank = [block for block in self._blank if block < end]
        self._blank_beyond = sorted(block for block in self._blank_beyond if block < end)
        cached = [(block_hash, self._hash_to_block[block_hash]) for block_hash in self._cached]
        for block_hash, block in reversed(cached):  # there may be room for few on the host
            if block >= end:
                self._cached.remove(block_hash)
                self._forget(block)
                if self._on_evict is not None:
                    self._on_evict(block, block_hash)

    def resize(self, num_blocks: int) -> None:
        """Have `num_blocks` blocks, all of them in use; those that come, or come back, are blank.

        Raises:
            BrokenInvariantError: One that would go is not retired.
        """
        if self.ref_counts[num_blocks:].any() or num_blocks < self._end:
            raise BrokenInvariantError(f"resize({num_blocks}) with blocks in use beyond")
        num_new = max(0, num_blocks - self.num_blocks)
        was_whole = self._border >= self.num_blocks
        # Not in place: views of the counts may be about.
        self._ref_counts = self._ref_counts[:num_blocks] + array("i", bytes(4 * num_new))
        self._hashes = self._hashes[:num_blocks] + [None] * num_new
        came = [b for b in range(self._end, num_blocks) if self._ref_counts[b] == 0]
        self.num_blocks = self._end = num_blocks
        self._blank_beyond += map(self._block_id, came)
        border = num_blocks if was_whole else min(self._border, num_blocks)
        self.set_border(self._block_id(border))

    def _forget(self, block: BlockIdT) -> None:
        """Let nobody find a free block that is not cached."""
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

        What was used last is not known. The content that became known last is evicted first: a
        prefix was known before what continues it.

        Args:
            tables: Distinct blocks each, of which somebody becomes a holder.
            blocks: Those whose content is known; what became known first, first.
            hashes: Parallel to it.
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
        self._blank = [b for b in self._blank if self._ref_counts[b] == 0 and not self._hashes[b]]

    def is_writable(self, block: BlockIdT) -> bool:
        """Whether a held block has one holder and no hash, so that this one may write it."""
        return self._ref_counts[block] == 1 and self._hashes[block] is None
