"""The disk tier: its blocks, and moves between disk blocks and host blocks.

A plan starts a move, and the result of the plan's step or of a later step reports the end of the
move. A requested store always starts with the next plan, because the swaps of the next plan may
overwrite the host block. The worker starts a plan's stores before the plan's swaps, so the content
is still there. Requested loads start oldest first. At most `max_disk_moves` loads are in progress
at a time; further loads wait, but never for stores.

Swapped sequences may hold disk blocks. Moves hold blocks, too:

    a store   holds its disk block from the call of `demote` or `keep` until the store ends. No
              lookup finds the disk block before the store ends.
    a load    holds its disk block and its host block from the call of `load` until the load ends.
              No lookup finds the host block before the load ends.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from contract.hashing import BlockHash
from contract.step import Result
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.interface.errors import BrokenInvariantError
from scheduler_svc.core.plan import PlanBuilder
from scheduler_svc.core.space.blocks import BlockPool, DiskBlockId, HostBlockId


@dataclass(slots=True)
class _Load:
    source: DiskBlockId
    block_hash: BlockHash | None
    """The hash of the content; None: no lookup may find the content."""


class DiskBooks(NamedTuple):
    """Views of the moves in progress, for the checks in `core/invariants.py`; read-only."""

    stores: Mapping[DiskBlockId, BlockHash | None]
    new_stores: Mapping[DiskBlockId, HostBlockId]
    storing: Mapping[BlockHash, DiskBlockId]
    loads: Mapping[HostBlockId, _Load]
    new_loads: Mapping[HostBlockId, DiskBlockId]
    targets: Mapping[DiskBlockId, HostBlockId]


class DiskTier:
    """Owns the disk blocks, and the moves between disk and host that are in progress."""

    def __init__(self, config: SchedulerConfig, host_pool: BlockPool[HostBlockId]) -> None:
        self.pool = BlockPool(config.num_disk_blocks, DiskBlockId, eviction=config.eviction)
        self.num_stored = 0
        self.num_loaded = 0
        self.num_failed = 0
        self._host_pool = host_pool
        self._max_moves = config.max_disk_moves
        self._stores: dict[DiskBlockId, BlockHash | None] = {}
        self._storing: dict[BlockHash, DiskBlockId] = {}
        self._new_stores: dict[DiskBlockId, HostBlockId] = {}  # stores that were not sent yet
        self._loads: dict[HostBlockId, _Load] = {}
        self._new_loads: dict[HostBlockId, DiskBlockId] = {}  # loads that were not sent yet
        self._targets: dict[DiskBlockId, HostBlockId] = {}  # the inverse of `_loads`

    # --- a step ---------------------------------------------------------------------------------

    @property
    def has_moves(self) -> bool:
        """Whether the next plan starts moves, and so must be sent even if it computes nothing."""
        return bool(self._new_stores) or bool(self._new_loads and self._num_loads_left)

    @property
    def is_busy(self) -> bool:
        """Whether moves are in progress.

        While moves are in progress, the worker delays the result of an empty step until a move
        ends.
        """
        return bool(self._stores or self._loads)

    @property
    def is_loading(self) -> bool:
        """Whether there is a load that has not ended."""
        return bool(self._loads)

    @property
    def _num_loads_left(self) -> int:
        return self._max_moves - (len(self._loads) - len(self._new_loads))

    def send(self, builder: PlanBuilder) -> None:
        """Add moves to a plan that is being sent."""
        builder.disk_store_src = list(self._new_stores.values())
        builder.disk_store_dst = list(self._new_stores)
        self._new_stores = {}
        for target in list(self._new_loads)[: self._num_loads_left]:
            builder.disk_load_src.append(self._new_loads.pop(target))
            builder.disk_load_dst.append(target)

    def answer(self, result: Result) -> None:
        """Record the moves that a result reports; forget contents that failed to load.

        Raises:
            BrokenInvariantError: The result reports a move that was not sent.
        """
        for stored in map(DiskBlockId, result.stored_disk_block_ids.tolist()):
            self._end_store(stored, is_good=True)
        for unstored in map(DiskBlockId, result.failed_disk_block_ids.tolist()):
            self._end_store(unstored, is_good=False)
        for loaded in map(HostBlockId, result.loaded_host_block_ids.tolist()):
            self._end_load(loaded, is_good=True)
        for unloaded in map(HostBlockId, result.failed_host_block_ids.tolist()):
            self._end_load(unloaded, is_good=False)

    def _end_store(self, block: DiskBlockId, *, is_good: bool) -> None:
        if block not in self._stores or block in self._new_stores:
            raise BrokenInvariantError(f"no store to disk block {block} is in progress")
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
            raise BrokenInvariantError(f"no load to host block {target} is in progress")
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
        """Store the content of a cached host block that the next plan overwrites.

        The content is lost if too many stores are in progress, or no disk block is available.
        """
        if (known := self._find(block_hash)) is not None:
            self.pool.share([known])  # makes the block the most recently used
            self.pool.drop([known])
        elif len(self._stores) < self._max_moves and self.pool.num_available:
            self.pool.drop([self._store(block, block_hash)])

    def keep(self, block: HostBlockId, block_hash: BlockHash | None) -> DiskBlockId:
        """Store a host block if the disk lacks its content; the next plan may overwrite `block`.

        Args:
            block: The host block. Its content must have been written by plans that were already
                sent. The store is part of the next plan, and starts before the next plan's swaps,
                so it cannot store what these swaps write. A disk block must be available.
            block_hash: The hash of the block's content; None: no lookup may find the content.

        Returns:
            The disk block. The caller becomes a holder of this block, and must drop the block from
            `pool` later.
        """
        if block_hash is not None and (known := self._find(block_hash)) is not None:
            self.pool.share([known])
            return known
        return self._store(block, block_hash)

    def is_storing(self, block: DiskBlockId) -> bool:
        """Whether a store to `block` has not ended, so that the block cannot be loaded."""
        return block in self._stores

    def _find(self, block_hash: BlockHash) -> DiskBlockId | None:
        """Return the disk block that has the content, or will have it when a store ends."""
        if (block := self._storing.get(block_hash)) is not None:
            return block
        found = self.pool.find([block_hash])
        return found[0] if found else None

    def _store(self, source: HostBlockId, block_hash: BlockHash | None) -> DiskBlockId:
        """Store a host block in a new disk block, which both the caller and the store hold."""
        (block,) = self.pool.allocate(1)
        self.pool.share([block])
        self._stores[block] = block_hash
        self._new_stores[block] = source
        if block_hash is not None:
            self._storing[block_hash] = block
        return block

    # --- loads ----------------------------------------------------------------------------------

    def target(self, source: DiskBlockId) -> HostBlockId | None:
        """Return the host block that `source` is being loaded to, if any."""
        return self._targets.get(source)

    def is_loading_to(self, target: HostBlockId) -> bool:
        """Whether a load to `target` has not ended."""
        return target in self._loads

    def load(self, source: DiskBlockId, target: HostBlockId, block_hash: BlockHash | None) -> None:
        """Load a disk block to the host; no store to it and no load of it may be in progress.

        Args:
            source: The disk block.
            target: A newly allocated host block, which the caller holds. From this call on, the
                load holds the block instead of the caller, until the load ends.
            block_hash: The hash of the content; None: no lookup may find the content.
        """
        self.pool.share([source])
        self._loads[target] = _Load(source, block_hash)
        self._new_loads[target] = source
        self._targets[source] = target

    def forget(self, hashes: Iterable[BlockHash]) -> None:
        """Remove the hashes of contents that may be wrong, including contents being moved."""
        for block_hash in hashes:
            if (storing := self._storing.pop(block_hash, None)) is not None:
                self._stores[storing] = None
            self.pool.forget(self.pool.find([block_hash]))
            for load in self._loads.values():
                if load.block_hash == block_hash:
                    load.block_hash = None

    def counts(self) -> dict[str, int]:
        """Return the disk tier's fields of `SchedulerLoad`."""
        return {
            "num_disk_blocks": self.pool.num_blocks,
            "num_free_disk_blocks": self.pool.num_free,
            "num_cached_disk_blocks": self.pool.num_cached,
            "num_stored_blocks": self.num_stored,
            "num_loaded_blocks": self.num_loaded,
            "num_failed_disk_moves": self.num_failed,
        }
