"""The blocks of one tier: who may write which, which are free, which are findable by content.

A block is in one of three states, told by its reference count and whether it has a hash:

    ref_count > 0            held: by block tables, by steps in flight, by swap-ins under way
    ref_count = 0, a hash    cached: findable, and evicted oldest first when blank ones run out
    ref_count = 0, no hash   blank

Cached and blank blocks are both *free*. A held block may have a hash too; it is then shared by
whoever finds it. Only a block with one holder and no hash is ever written.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NewType, TypeVar

from scheduler_svc.core.block_hash import BlockHash
from scheduler_svc.core.errors import BrokenInvariantError

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
    ) -> None:
        """`on_evict` hears of each cached block that `allocate` gives away, and of its hash."""
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._ref_counts = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._hash_to_block: dict[BlockHash, BlockIdT] = {}
        # A stack, so that low numbers are used first and again, and the pool's end stays empty.
        self._blank = [block_id(b) for b in reversed(range(num_blocks))]
        self._cached: OrderedDict[BlockIdT, BlockHash] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give: blank and cached."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and that can still be found by hash."""
        return len(self._cached)

    @property
    def num_blank(self) -> int:
        """Blocks that `allocate` can give without evicting one."""
        return len(self._blank)

    def ref_count(self, block: BlockIdT) -> int:
        """Return how many hold `block`."""
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[BlockIdT]:
        """Take `count` blocks, each with one holder and no hash: blank, then the oldest cached.

        Raises:
            BrokenInvariantError: `count` exceeds `num_free`, which the caller checks first.
        """
        if count > self.num_free:
            raise BrokenInvariantError(f"allocate({count}) with {self.num_free} free blocks")
        blocks = [self._blank.pop() for _ in range(min(count, len(self._blank)))]
        while len(blocks) < count:
            block, block_hash = self._cached.popitem(last=False)
            self._unpublish(block)
            blocks.append(block)
            if self._on_evict is not None:
                self._on_evict(block, block_hash)
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[BlockIdT]) -> None:
        """Add a holder to each block, which is held or cached."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                if block not in self._cached:
                    raise BrokenInvariantError(f"share of blank block {block}")
                del self._cached[block]
            self._ref_counts[block] += 1

    def drop(self, blocks: Sequence[BlockIdT]) -> None:
        """Remove a holder from each block of a table.

        The table's last blocks become free first, so they are evicted before the prefixes they
        continue, without which they could not be found.
        """
        for block in reversed(blocks):
            count = self._ref_counts[block] - 1
            if count < 0:
                raise BrokenInvariantError(f"drop of free block {block}")
            self._ref_counts[block] = count
            if count == 0:
                if (block_hash := self._hashes[block]) is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = block_hash

    def publish(self, block: BlockIdT, block_hash: BlockHash) -> None:
        """Make a held, full block findable. If another block has this content, that one stays."""
        if self._hashes[block] is None and block_hash not in self._hash_to_block:
            self._hashes[block] = block_hash
            self._hash_to_block[block_hash] = block

    def forget(self, blocks: Iterable[BlockIdT]) -> None:
        """Make blocks unfindable, because their content is not to be trusted."""
        for block in blocks:
            self._unpublish(block)
            if block in self._cached:
                del self._cached[block]
                self._blank.append(block)

    def find(self, hashes: Iterable[BlockHash]) -> list[BlockIdT]:
        """Return the blocks of the longest prefix of `hashes` that is findable; changes nothing."""
        blocks = []
        for block_hash in hashes:
            block = self._hash_to_block.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _unpublish(self, block: BlockIdT) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._hash_to_block[block_hash]
            self._hashes[block] = None
