"""Tracks the blocks in one worker's prefix cache, by tier, with their tokens.

The core of an attached worker reports each change to a `KvIndex` (see `CacheWatch`). The index has
an entry for each block hash that can be found in some tier. The entries are in order of arrival, so
a block comes after its parent, the block before it in the prompt. The entries are kept in *drawers*
of bounded size, so that a snapshot can be made drawer by drawer while entries come and go.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from contract.arrays import Int32Array
from contract.hashing import BlockHash
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.space.cache_watcher import CacheTier

_DRAWER_SIZE: Final = 256


class KvBlock:
    """A block of the prefix cache, in one or several tiers."""

    __slots__ = ("block_hash", "drawer", "parent", "salt", "tiers", "token_bytes")

    def __init__(
        self, block_hash: BlockHash, drawer: int, parent: BlockHash | None, salt: str, tokens: bytes
    ) -> None:
        self.block_hash = block_hash
        self.drawer = drawer
        self.parent = parent
        """The hash of the parent; None: unknown, or the block is the first of its prompt."""
        self.salt = salt
        """The `Request.cache_salt` of the requests that share the block."""
        self.token_bytes = tokens
        """The block's tokens as little-endian int32; empty: the tokens are unknown, because an
        earlier scheduler published the block."""
        self.tiers: tuple[CacheTier, ...] = ()
        """The tiers that have the block; empty: no tier has it any more."""


class Change(NamedTuple):
    """Describes that a tier has gained or lost a block."""

    block: KvBlock
    tier: CacheTier
    is_stored: bool


class KvIndex:
    """The blocks in a worker's prefix cache, from the worker's attachment until its loss.

    Implements `CacheWatch`, through which the core reports the blocks.
    """

    def __init__(self, block_size: int, on_change: Callable[[], None]) -> None:
        """`on_change` is called at the first change, and at the first after each `take_changes`."""
        self.block_size = block_size
        self._on_change = on_change
        self._blocks: dict[BlockHash, KvBlock] = {}
        self._drawers: dict[int, dict[BlockHash, KvBlock]] = {0: {}}
        self._last_drawer = 0
        self._named: dict[BlockHash, tuple[BlockHash | None, str, bytes]] = {}
        """Maps the hash of a block that is about to be published (see `on_named`) to the block's
        parent, salt and tokens."""
        self._changes: list[Change] = []

    def __len__(self) -> int:
        return len(self._blocks)

    # --- for the core (CacheWatch) --------------------------------------------------------------

    def table(self, tier: CacheTier) -> dict[BlockHash, Any]:
        """Return the hash table for the pool of `tier`; it reports its changes to this index."""
        return _PoolTable(self, tier)

    def on_named(self, seq: Sequence, first: int, end: int, token_ids: Int32Array) -> None:
        """Record the tokens of the blocks [first, end) of `seq`, which are about to be published.

        If an earlier scheduler published blocks before `first`, the tokens of those blocks were
        unknown until now. So those blocks are reported again, with their tokens.
        """
        hashes, salt = seq.block_hashes, seq.request.cache_salt
        begin = first
        while begin and (known := self._blocks.get(hashes[begin - 1])) and not known.token_bytes:
            begin -= 1
        size = self.block_size
        data = token_ids[begin * size : end * size].astype("<i4", copy=False).tobytes()
        for index in range(begin, end):
            start = 4 * size * (index - begin)
            parent = hashes[index - 1] if index else None
            content = parent, salt, data[start : start + 4 * size]
            if index >= first:
                self._named[hashes[index]] = content
            else:
                block = self._blocks[hashes[index]]
                block.parent, block.salt, block.token_bytes = content
                for tier in block.tiers:
                    self._add_change(Change(block, tier, is_stored=True))

    def stored(self, block_hash: BlockHash, tier: CacheTier) -> None:
        block = self._blocks.get(block_hash)
        if block is None:
            block = self._file(block_hash)
        block.tiers += (tier,)
        self._add_change(Change(block, tier, is_stored=True))

    def removed(self, block_hash: BlockHash, tier: CacheTier) -> None:
        block = self._blocks[block_hash]
        block.tiers = tuple(each for each in block.tiers if each is not tier)
        if not block.tiers:
            del self._blocks[block_hash]
            drawer = self._drawers[block.drawer]
            del drawer[block_hash]
            if not drawer and block.drawer != self._last_drawer:
                del self._drawers[block.drawer]
        self._add_change(Change(block, tier, is_stored=False))

    # --- for the feed ---------------------------------------------------------------------------

    def take_changes(self) -> list[Change]:
        """Return the changes since the last call, in order."""
        changes, self._changes = self._changes, []
        self._named.clear()
        return changes

    def drawers(self) -> Iterator[list[KvBlock]]:
        """Yield all blocks that exist at the call, as one list for each drawer.

        The index may change while the caller reads; `take_changes` has blocks that arrive later.
        """
        for number in list(self._drawers):
            if (drawer := self._drawers.get(number)) is not None:
                yield list(drawer.values())

    def _file(self, block_hash: BlockHash) -> KvBlock:
        drawer = self._drawers[self._last_drawer]
        if len(drawer) >= _DRAWER_SIZE:
            self._last_drawer += 1
            drawer = self._drawers[self._last_drawer] = {}
        content = self._named.pop(block_hash, (None, "", b""))
        block = KvBlock(block_hash, self._last_drawer, *content)
        drawer[block_hash] = self._blocks[block_hash] = block
        return block

    def _add_change(self, change: Change) -> None:
        if not self._changes:
            self._on_change()
        self._changes.append(change)


class _PoolTable(dict[BlockHash, Any]):
    """The hash table of one pool.

    It overrides the dict methods by which `BlockPool` adds and removes blocks, to tell the index.
    """

    def __init__(self, index: KvIndex, tier: CacheTier) -> None:
        super().__init__()
        self._index = index
        self._tier = tier

    def __setitem__(self, block_hash: BlockHash, block: Any) -> None:
        if block_hash not in self:
            self._index.stored(block_hash, self._tier)
        super().__setitem__(block_hash, block)

    def setdefault(self, block_hash: BlockHash, block: Any = None) -> Any:
        if block_hash not in self:
            self._index.stored(block_hash, self._tier)
        return super().setdefault(block_hash, block)

    def __delitem__(self, block_hash: BlockHash) -> None:
        super().__delitem__(block_hash)
        self._index.removed(block_hash, self._tier)

    def pop(self, block_hash: BlockHash) -> Any:  # type: ignore[override]
        block = super().pop(block_hash)
        self._index.removed(block_hash, self._tier)
        return block
