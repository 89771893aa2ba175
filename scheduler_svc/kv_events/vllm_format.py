"""KV events as vLLM writes them, in MessagePack: a batch is an array, and an event is a map.

The types and fields are those of vLLM's `distributed/kv_events.py`. Subscribers of vLLM's events
treat a publisher as one engine. So a block counts as stored in a tier while at least one worker has
the block in this tier. When a worker is lost, a block counts as removed if no other worker has it.
"""

import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import msgspec

from contract.block_holders import BlockHolders
from contract.hashing import NO_HASH, BlockHash, split_hashes
from quire.v1 import kv_pb2

_MEDIA: Final[dict[int, str]] = {
    kv_pb2.KV_TIER_DEVICE: "GPU",
    kv_pb2.KV_TIER_HOST: "CPU",
    kv_pb2.KV_TIER_DISK: "STORAGE",
}


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True, gc=False):
    """Tells that a tier has stored consecutive blocks of a prompt, each the parent of the next."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    """The tokens of all blocks of the event; empty: the tokens are unknown."""
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    """For each block of the event: the cache salt if the block is the first of its prompt, else
    None. If the blocks have no cache salt, there is no list."""


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True, gc=False):
    """Tells that a tier no longer has some blocks."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True, gc=False):
    """Reports that no tier has any block any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The contents of one message."""

    ts: float
    """Seconds since 1970."""
    events: list[Event]
    data_parallel_rank: int | None = None


def encode(events: list[Event]) -> bytes:
    """Return the bytes of a batch of events, with the current time."""
    return msgspec.msgpack.encode(KVEventBatch(time.time(), events, 0))


class AsOneEngine:
    """Converts the events of all workers to the events of a single vLLM engine."""

    def __init__(self) -> None:
        self._tier_to_holders = {tier: BlockHolders[str]() for tier in _MEDIA}

    def apply(self, message: kv_pb2.WatchKvResponse) -> Iterator[list[Event]]:
        """Apply events of one worker; yield the events for the subscribers, in parts.

        A part may be empty. The caller should let other tasks run between two parts, because to
        forget a million blocks of a lost worker takes a second.
        """
        worker = message.worker
        events: list[Event] = []
        for event in message.events:
            match event.WhichOneof("event"):
                case "stored":
                    self._tier_to_holders[event.stored.tier].add(
                        split_hashes(event.stored.block_hashes), worker
                    )
                    events += _stored(event.stored, message.block_size)
                case "removed":
                    tier: int = event.removed.tier
                    hashes = split_hashes(event.removed.block_hashes)
                    events += _removed(self._tier_to_holders[tier].remove(hashes, worker), tier)
                case "begin" | "cleared":
                    yield events
                    events = []
                    for tier, holders in self._tier_to_holders.items():
                        for gone in holders.clear(worker):
                            yield [*_removed(gone, tier)]
        yield events


def _stored(stored: kv_pb2.KvBlocksStored, block_size: int) -> Iterator[Event]:
    hashes, parents = split_hashes(stored.block_hashes), split_hashes(stored.parent_hashes)
    parents = parents or [NO_HASH] * len(hashes)
    token_ids = memoryview(stored.token_ids).cast("i").tolist()
    # A run begins at each block that is not the child of the one before.
    begins = [i for i, parent in enumerate(parents) if not i or parent != hashes[i - 1]]
    for begin, end in pairwise([*begins, len(hashes)]):
        is_first = parents[begin] == NO_HASH
        salts = (stored.cache_salt,) if is_first else None
        yield BlockStored(
            block_hashes=[*map(_number, hashes[begin:end])],
            parent_block_hash=None if is_first else _number(parents[begin]),
            token_ids=token_ids[begin * block_size : end * block_size],
            block_size=block_size,
            lora_id=None,
            medium=_MEDIA[stored.tier],
            lora_name=stored.adapter or None,
            extra_keys=[salts, *[None] * (end - begin - 1)] if stored.cache_salt else None,
        )


def _removed(hashes: list[BlockHash], tier: int) -> Iterator[Event]:
    if hashes:
        yield BlockRemoved([*map(_number, hashes)], _MEDIA[tier])


def _number(block_hash: BlockHash) -> int:
    return int.from_bytes(block_hash[:8], "big")
