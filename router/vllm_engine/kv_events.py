"""Presents the prefix caches of a cell as the cache of one engine.

A gateway treats a cell as one engine: a block is cached while any worker has it in any tier. The
gateway finds blocks by their tokens, so a block is reported once its tokens are known.
"""

import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing

from contract.hashing import NO_HASH, BlockHash, split_hashes
from quire.v1.kv_pb2 import KvBlocksStored, WatchKvResponse
from quire.vllm_engine import smg_common_pb2 as pb


async def batches(
    messages: AsyncGenerator[WatchKvResponse],
) -> AsyncGenerator[pb.KvEventBatch]:
    """Convert the workers' events to numbered batches of one engine; the first batch clears all."""
    cell = CellIndex()
    sequence = event_id = 0
    async with aclosing(messages):
        async for message in messages:
            events = [*cell.apply(message)]
            if not sequence:
                events.insert(0, pb.KvCacheEvent(cleared=pb.KvCacheCleared()))
            if events:
                sequence += 1
                for event in events:
                    event_id += 1
                    event.event_id = event_id
                yield pb.KvEventBatch(
                    sequence_number=sequence, timestamp=time.time(), events=events
                )


class CellIndex:
    """Tracks which workers have which blocks in which tiers."""

    def __init__(self) -> None:
        self._workers: dict[str, dict[BlockHash, set[int]]] = {}
        """Per worker: the tiers of each block."""
        self._num_workers: Counter[BlockHash] = Counter()
        """Number of workers that have a block."""
        self._told: set[BlockHash] = set()
        """The blocks that were reported to the gateway."""

    def apply(self, message: WatchKvResponse) -> Iterator[pb.KvCacheEvent]:
        """Apply the events of one worker; yield the resulting changes of the cell."""
        blocks = self._workers.setdefault(message.worker, {})
        for event in message.events:
            match event.WhichOneof("event"):
                case "stored":
                    yield from self._store(blocks, event.stored, message.block_size)
                case "removed":
                    hashes = split_hashes(event.removed.block_hashes)
                    tier = event.removed.tier
                    yield from self._remove([h for h in hashes if _loses(blocks, h, tier)])
                case "begin" | "cleared":
                    hashes = [*blocks]
                    blocks.clear()
                    yield from self._remove(hashes)

    def _store(
        self, blocks: dict[BlockHash, set[int]], stored: KvBlocksStored, block_size: int
    ) -> Iterator[pb.KvCacheEvent]:
        hashes = split_hashes(stored.block_hashes)
        for block_hash in hashes:
            if block_hash not in blocks:
                blocks[block_hash] = set()
                self._num_workers[block_hash] += 1
            blocks[block_hash].add(stored.tier)
        if not stored.token_ids:
            return
        parents = split_hashes(stored.parent_hashes)
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

    def _remove(self, hashes: Sequence[BlockHash]) -> Iterator[pb.KvCacheEvent]:
        gone = []
        for block_hash in hashes:
            self._num_workers[block_hash] -= 1
            if not self._num_workers[block_hash]:
                del self._num_workers[block_hash]
                if block_hash in self._told:
                    self._told.discard(block_hash)
                    gone.append(_number(block_hash))
        if gone:
            yield pb.KvCacheEvent(removed=pb.KvBlocksRemoved(block_hashes=gone))


def _loses(blocks: dict[BlockHash, set[int]], block_hash: BlockHash, tier: int) -> bool:
    """Remove a block from a tier; return whether the worker has it in no other tier."""
    tiers = blocks.get(block_hash)
    if tiers is None:
        return False
    tiers.discard(tier)
    if tiers:
        return False
    del blocks[block_hash]
    return True


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
