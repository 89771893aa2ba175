"""Presents the prefix caches of a cell's workers to a gateway as one cache.

The gateway treats a cell as one inference server. To the gateway, a block is cached while any
worker has the block in any tier. The gateway finds blocks by their tokens, so a block is reported
to the gateway only once the block's tokens are known.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from itertools import chain

from contract.block_holders import BlockHolders
from contract.hashing import NO_HASH, BlockHash, split_hashes
from quire.v1.kv_pb2 import KvBlocksStored, KvTier, WatchKvResponse
from quire.vllm_engine import smg_common_pb2 as pb


async def batches(
    messages: AsyncGenerator[WatchKvResponse],
) -> AsyncGenerator[pb.KvEventBatch]:
    """Convert the events of all workers to numbered batches for a gateway.

    The first batch tells the gateway to forget all blocks.
    """
    cell = CellIndex()
    sequence = event_id = 0
    async with aclosing(messages):
        async for message in messages:
            parts = cell.apply(message)
            if not sequence:
                parts = chain([[pb.KvCacheEvent(cleared=pb.KvCacheCleared())]], parts)
            for events in parts:
                if events:
                    sequence += 1
                    for event in events:
                        event_id += 1
                        event.event_id = event_id
                    yield pb.KvEventBatch(
                        sequence_number=sequence, timestamp=time.time(), events=events
                    )
                await asyncio.sleep(0)


class CellIndex:
    """Tracks which workers have which blocks in which tiers."""

    def __init__(self) -> None:
        self._holders = BlockHolders[tuple[str, int]]()
        """For each block, the pairs of worker and tier that have the block."""
        self._told: set[BlockHash] = set()
        """The blocks that were reported to the gateway as stored, and not as removed since."""

    def apply(self, message: WatchKvResponse) -> Iterator[list[pb.KvCacheEvent]]:
        """Apply the events of one worker; yield the resulting changes of the cell, in parts.

        A part may be empty. Between two parts, the caller should let other tasks run, because it
        takes a second to remove a million blocks of a lost worker.
        """
        events: list[pb.KvCacheEvent] = []
        for event in message.events:
            match event.WhichOneof("event"):
                case "stored":
                    holder = message.worker, int(event.stored.tier)
                    self._holders.add(split_hashes(event.stored.block_hashes), holder)
                    events += self._tell(event.stored, message.block_size)
                case "removed":
                    holder = message.worker, int(event.removed.tier)
                    hashes = split_hashes(event.removed.block_hashes)
                    events += self._remove(self._holders.remove(hashes, holder))
                case "begin" | "cleared":
                    yield events
                    events = []
                    for tier in KvTier.values():
                        for gone in self._holders.clear((message.worker, tier)):
                            yield [*self._remove(gone)]
        yield events

    def _tell(self, stored: KvBlocksStored, block_size: int) -> Iterator[pb.KvCacheEvent]:
        if not stored.token_ids:
            return
        hashes, parents = split_hashes(stored.block_hashes), split_hashes(stored.parent_hashes)
        run: pb.KvBlocksStored | None = None
        last = b""
        for index, (block_hash, parent) in enumerate(zip(hashes, parents, strict=True)):
            if block_hash in self._told:
                continue
            self._told.add(block_hash)
            if run is None or parent != last:
                if run is not None:
                    yield pb.KvCacheEvent(stored=run)
                run = _begin(stored, parent)
            start = 4 * block_size * index
            data = memoryview(stored.token_ids)[start : start + 4 * block_size]
            run.blocks.add(
                block_hash=_number(block_hash), token_ids=data.cast("i"), block_size=block_size
            )
            last = block_hash
        if run is not None:
            yield pb.KvCacheEvent(stored=run)

    def _remove(self, gone: Iterable[BlockHash]) -> Iterator[pb.KvCacheEvent]:
        if told := self._told.intersection(gone):
            self._told -= told
            removed = pb.KvBlocksRemoved(block_hashes=map(_number, told))
            yield pb.KvCacheEvent(removed=removed)


def _begin(stored: KvBlocksStored, parent: BlockHash) -> pb.KvBlocksStored:
    run = pb.KvBlocksStored(tier=pb.KvCacheTier.Name(stored.tier))
    if parent != NO_HASH:
        run.parent_block_hash = _number(parent)
    if stored.adapter:
        run.lora_name = stored.adapter
    if stored.cache_salt:
        run.cache_salt = stored.cache_salt
    return run


def _number(block_hash: BlockHash) -> int:
    return int.from_bytes(block_hash[:8], "big", signed=True)
