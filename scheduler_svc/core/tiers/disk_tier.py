"""The disk tier: its blocks, and what moves between them and the host's blocks.

A move goes out with a plan and takes as long as it takes; the outcome of some later step says that
it has ended. Stores go out with the next plan, all of them, because that plan may reuse their host
blocks. Loads go out in the order asked for, `max_disk_moves` at a time, and never wait for stores.

Holders of a disk block, besides the sequences that have spilled to it:

    a store   its disk block, from when it is asked for until it has ended. Only then can the block
              be found: before, it holds nothing.
    a load    its disk block and its host block, likewise. The host block can be found from then on.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from contract.hashing import BlockHash
from contract.step import Result
from scheduler_svc.core.blocks import BlockPool, DiskBlockId, HostBlockId
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.errors import BrokenInvariantError
from scheduler_svc.core.plan import PlanBuilder


@dataclass(slots=True)
class _Load:
    source: DiskBlockId
    block_hash: BlockHash | None
    """The hash of its content, if that may be found."""


class DiskBooks(NamedTuple):
    """The moves under way, live; for invariants, which only read them."""

    stores: Mapping[DiskBlockId, BlockHash | None]
    new_stores: Mapping[DiskBlockId, HostBlockId]
    storing: Mapping[BlockHash, DiskBlockId]
    loads: Mapping[HostBlockId, _Load]
    new_loads: Mapping[HostBlockId, DiskBlockId]
    targets: Mapping[DiskBlockId, HostBlockId]


class DiskTier:
    """Owns the disk blocks, and the moves under way."""

    def __init__(self, config: SchedulerConfig, host_pool: BlockPool[HostBlockId]) -> None:
        self.pool = BlockPool(config.num_disk_blocks, DiskBlockId, eviction=config.eviction)
        self.num_stored = 0
        self.num_loaded = 0
        self.num_failed = 0
        self._host_pool = host_pool
        self._max_moves = config.max_disk_moves
        self._stores: dict[DiskBlockId, BlockHash | None] = {}
        self._storing: dict[BlockHash, DiskBlockId] = {}
        self._new_stores: dict[DiskBlockId, HostBlockId] = {}  # of `_stores`, not gone out
        self._loads: dict[HostBlockId, _Load] = {}
        self._new_loads: dict[HostBlockId, DiskBlockId] = {}  # of `_loads`, not gone out
        self._targets: dict[DiskBlockId, HostBlockId] = {}  # of `_loads`

    # --- a step ---------------------------------------------------------------------------------

    @property
    def has_moves(self) -> bool:
        """Whether a plan must go out, even if it computes nothing."""
        return bool(self._new_stores) or bool(self._new_loads and self._num_loads_left)

    @property
    def is_busy(self) -> bool:
        """Whether a move has not ended; an empty step waits for one of those gone out."""
        return bool(self._stores or self._loads)

    @property
    def is_loading(self) -> bool:
        """Whether a load has not ended."""
        return bool(self._loads)

    @property
    def _num_loads_left(self) -> int:
        return self._max_moves - (len(self._loads) - len(self._new_loads))

    def send(self, draft: PlanBuilder) -> None:
        """Put what can move into a plan that goes out."""
        draft.disk_store_src = list(self._new_stores.values())
        draft.disk_store_dst = list(self._new_stores)
        self._new_stores = {}
        for target in list(self._new_loads)[: self._num_loads_left]:
            draft.disk_load_src.append(self._new_loads.pop(target))
            draft.disk_load_dst.append(target)

    def answer(self, outcome: Result) -> None:
        """End moves; what fails to be loaded is forgotten.

        Raises:
            BrokenInvariantError: There is no such move.
        """
        for stored in map(DiskBlockId, outcome.stored_disk_block_ids.tolist()):
            self._end_store(stored, is_good=True)
        for unstored in map(DiskBlockId, outcome.failed_disk_block_ids.tolist()):
            self._end_store(unstored, is_good=False)
        for loaded in map(HostBlockId, outcome.loaded_host_block_ids.tolist()):
            self._end_load(loaded, is_good=True)
        for unloaded in map(HostBlockId, outcome.failed_host_block_ids.tolist()):
            self._end_load(unloaded, is_good=False)

    def _end_store(self, block: DiskBlockId, *, is_good: bool) -> None:
        if block not in self._stores or block in self._new_stores:
            raise BrokenInvariantError(f"no store to disk block {block} is under way")
        block_hash = self._stores.pop(block)
        if block_hash is not None:
            del self._storing[block_hash]
            if is_good:
                self.pool.publish([block], [block_hash])
        self.pool.drop([block])
        self.num_stored += is_good
        self.num_failed += not is_good

    def _end_load(self, target: HostBlockId, *, is_good: bool) -> None:
        if target not in self._loads or target in self._new_loads:
            raise BrokenInvariantError(f"no load to host block {target} is under way")
        load = self._loads.pop(target)
        del self._targets[load.source]
        if not is_good:
            self.pool.forget([load.source])
        elif load.block_hash is not None:
            self._host_pool.publish([target], [load.block_hash])
        self._host_pool.drop([target])
        self.pool.drop([load.source])
        self.num_loaded += is_good
        self.num_failed += not is_good

    @property
    def books(self) -> DiskBooks:
        """The moves under way."""
        return DiskBooks(
            self._stores,
            self._new_stores,
            self._storing,
            self._loads,
            self._new_loads,
            self._targets,
        )

    # --- stores ---------------------------------------------------------------------------------

    def demote(self, block: HostBlockId, block_hash: BlockHash) -> None:
        """Keep the content of a cached host block that is being reused by the next plan.

        It is lost if too many stores are under way already.
        """
        if (known := self._find(block_hash)) is not None:
            self.pool.share([known])  # as good as new
            self.pool.drop([known])
        elif len(self._stores) < self._max_moves and self.pool.num_available:
            self.pool.drop([self._store(block, block_hash)])

    def keep(self, block: HostBlockId, block_hash: BlockHash | None) -> DiskBlockId:
        """Store a host block with the next plan, which may reuse it, unless the disk has it.

        Args:
            block: Holds what plans sent before have put there. A disk block is free.
            block_hash: Of its content, if that may be found.

        Returns:
            The disk block; the caller is a holder.
        """
        if block_hash is not None and (known := self._find(block_hash)) is not None:
            self.pool.share([known])
            return known
        return self._store(block, block_hash)

    def is_storing(self, block: DiskBlockId) -> bool:
        """Whether a store to `block` has not ended, so that it cannot be loaded."""
        return block in self._stores

    def _find(self, block_hash: BlockHash) -> DiskBlockId | None:
        """Return the block that holds a content, or will."""
        if (block := self._storing.get(block_hash)) is not None:
            return block
        found = self.pool.find([block_hash])
        return found[0] if found else None

    def _store(self, source: HostBlockId, block_hash: BlockHash | None) -> DiskBlockId:
        """Have a block stored in a new one, which the caller holds, as does the store."""
        (block,) = self.pool.allocate(1)
        self.pool.share([block])
        self._stores[block] = block_hash
        self._new_stores[block] = source
        if block_hash is not None:
            self._storing[block_hash] = block
        return block

    # --- loads ----------------------------------------------------------------------------------

    def target(self, source: DiskBlockId) -> HostBlockId | None:
        """Return the host block that `source` is being loaded to, if it is."""
        return self._targets.get(source)

    def is_loading_to(self, target: HostBlockId) -> bool:
        """Whether a load to `target` has not ended."""
        return target in self._loads

    def load(self, source: DiskBlockId, target: HostBlockId, block_hash: BlockHash | None) -> None:
        """Load a disk block that holds something and is not being loaded.

        Args:
            source: The block.
            target: A new host block; the load takes its one reference.
            block_hash: Of the content, if that may be found.
        """
        self.pool.share([source])
        self._loads[target] = _Load(source, block_hash)
        self._new_loads[target] = source
        self._targets[source] = target

    def forget(self, hashes: Iterable[BlockHash]) -> None:
        """Make contents unfindable, those on their way included: they are not to be trusted."""
        for block_hash in hashes:
            if (storing := self._storing.pop(block_hash, None)) is not None:
                self._stores[storing] = None
            self.pool.forget(self.pool.find([block_hash]))
            for load in self._loads.values():
                if load.block_hash == block_hash:
                    load.block_hash = None

    def counts(self) -> dict[str, int]:
        """Return its part of a `SchedulerLoad`, by field."""
        return {
            "num_disk_blocks": self.pool.num_blocks,
            "num_free_disk_blocks": self.pool.num_free,
            "num_cached_disk_blocks": self.pool.num_cached,
            "num_stored_blocks": self.num_stored,
            "num_loaded_blocks": self.num_loaded,
            "num_failed_disk_moves": self.num_failed,
        }
