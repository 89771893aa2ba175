"""Tracks which workers have which blocks, so that a cell can report KV events as one vLLM engine.

No call delays the event loop for long, however many blocks are tracked. The blocks are spread over
many small dicts, because a dict of a million blocks takes tens of milliseconds to grow.
"""

from collections.abc import Hashable, Iterable, Iterator
from typing import Final, Generic, TypeVar

from contract.hashing import BlockHash

HolderT = TypeVar("HolderT", bound=Hashable)

_NUM_TABLES: Final = 1024
_PART_BLOCKS: Final = 512
"""`clear` checks about this many blocks before each `yield`; checking them takes half a millisecond
(`bench/kv_events.py`)."""


class BlockHolders(Generic[HolderT]):
    """The holders of each block; a holder is a worker, or one tier of a worker.

    A block without holders is forgotten.
    """

    def __init__(self) -> None:
        self._tables: list[dict[BlockHash, tuple[HolderT, ...]]] = [{} for _ in range(_NUM_TABLES)]

    def add(self, hashes: Iterable[BlockHash], holder: HolderT) -> None:
        """Record that `holder` holds these blocks."""
        alone = (holder,)
        for block_hash in hashes:
            table = self._table(block_hash)
            if holder not in (holders := table.setdefault(block_hash, alone)):
                table[block_hash] = (*holders, holder)

    def remove(self, hashes: Iterable[BlockHash], holder: HolderT) -> list[BlockHash]:
        """Record that `holder` lost these blocks; return the blocks that now have no holder.

        Blocks that `holder` did not hold are ignored.
        """
        gone = []
        for block_hash in hashes:
            table = self._table(block_hash)
            if holder in (holders := table.get(block_hash, ())):
                if len(holders) == 1:
                    del table[block_hash]
                    gone.append(block_hash)
                else:
                    table[block_hash] = tuple(each for each in holders if each != holder)
        return gone

    def clear(self, holder: HolderT) -> Iterator[list[BlockHash]]:
        """Remove `holder` from all its blocks, in parts.

        For each part, yield the blocks of the part that now have no holder. Between two parts, the
        caller should let other tasks run. Until the last part, no other task may call `add` or
        `remove`.
        """
        num_seen, held = 0, list[BlockHash]()
        for table in self._tables:
            num_seen += 1 + len(table)
            held += [block_hash for block_hash, holders in table.items() if holder in holders]
            if num_seen >= _PART_BLOCKS:
                yield self.remove(held, holder)
                num_seen, held = 0, []
        yield self.remove(held, holder)

    def _table(self, block_hash: BlockHash) -> dict[BlockHash, tuple[HolderT, ...]]:
        return self._tables[(block_hash[-2] << 8 | block_hash[-1]) % _NUM_TABLES]
