"""KV events as vLLM writes them: msgpack, a batch as an array with events as maps.

Types and fields are as in vLLM's `distributed/kv_events.py`. Subscribers of vLLM's events treat a
publisher as one engine. So a block counts as stored in a tier while any worker has it there, and
the blocks of a lost worker are removed one by one.
"""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Final

import msgspec

from contract.hashing import NO_HASH, BlockHash, split_hashes
from quire.v1 import kv_pb2

_MEDIA: Final[dict[int, str]] = {
    kv_pb2.KV_TIER_DEVICE: "GPU",
    kv_pb2.KV_TIER_HOST: "CPU",
    kv_pb2.KV_TIER_DISK: "STORAGE",
}


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True, gc=False):
    """Blocks of one prompt, each after its parent."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    """Empty: unknown."""
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    """For each block: the cache salt, if it is the first of its prompt."""


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True, gc=False):
    """Blocks that a tier no longer has."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True, gc=False):
    """No tier has any block."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The contents of one message."""

    ts: float
    """Seconds since 1970."""
    events: list[Event]
    data_parallel_rank: int | None = None


def encode(events: list[Event]) -> bytes:
    """Write a batch."""
    return msgspec.msgpack.encode(KVEventBatch(time.time(), events, 0))


_Place = tuple[BlockHash, int]
"""A block's hash, and a tier."""


class AsOneEngine:
    """Converts the workers' events to events of one engine."""

    def __init__(self) -> None:
        self._worker_to_places: dict[str, set[_Place]] = {}
        self._num_workers: Counter[_Place] = Counter()

    def apply(self, message: kv_pb2.WatchKvResponse) -> Iterator[Event]:
        """Apply the events of one worker; yield the changes of the engine."""
        places = self._worker_to_places.setdefault(message.worker, set())
        for event in message.events:
            match event.WhichOneof("event"):
                case "stored":
                    yield from self._store(places, event.stored, message.block_size)
                case "removed":
                    tier: int = event.removed.tier
                    hashes = split_hashes(event.removed.block_hashes)
                    gone = {(block_hash, tier) for block_hash in hashes} & places
                    yield from self._remove(places, gone)
                case "begin" | "cleared":
                    yield from self._remove(places, set(places))

    def _store(
        self, places: set[_Place], stored: kv_pb2.KvBlocksStored, block_size: int
    ) -> Iterator[Event]:
        hashes, parents = split_hashes(stored.block_hashes), split_hashes(stored.parent_hashes)
        run: BlockStored | None = None
        for index, block_hash in enumerate(hashes):
            if (place := (block_hash, stored.tier)) not in places:
                places.add(place)
                self._num_workers[place] += 1
            parent = parents[index] if parents else NO_HASH
            if run is None or index == 0 or parent != hashes[index - 1] or not parents:
                if run is not None:
                    yield run
                run = _begin(stored, parent, block_size)
            start = 4 * block_size * index
            run.block_hashes.append(_number(block_hash))
            data = memoryview(stored.token_ids)[start : start + 4 * block_size]
            run.token_ids.extend(data.cast("i") if parents else ())
            if run.extra_keys is not None:
                run.extra_keys.append((stored.cache_salt,) if parent == NO_HASH else None)
        if run is not None:
            yield run

    def _remove(self, places: set[_Place], gone: set[_Place]) -> Iterator[BlockRemoved]:
        places -= gone
        medium_to_hashes: dict[str, list[int]] = {}
        for place in gone:
            self._num_workers[place] -= 1
            if not self._num_workers[place]:
                del self._num_workers[place]
                hashes = medium_to_hashes.setdefault(_MEDIA[place[1]], [])
                hashes.append(_number(place[0]))
        for medium, hashes in medium_to_hashes.items():
            yield BlockRemoved(hashes, medium)


def _begin(stored: kv_pb2.KvBlocksStored, parent: BlockHash, block_size: int) -> BlockStored:
    return BlockStored(
        block_hashes=[],
        parent_block_hash=None if parent == NO_HASH else _number(parent),
        token_ids=[],
        block_size=block_size,
        lora_id=None,
        medium=_MEDIA[stored.tier],
        lora_name=stored.adapter or None,
        extra_keys=[] if stored.cache_salt else None,
    )


def _number(block_hash: BlockHash) -> int:
    return int.from_bytes(block_hash[:8], "big")
