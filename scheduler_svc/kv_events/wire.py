"""Converts changes of the prefix cache, and the blocks of a snapshot, to protobuf events."""

from collections.abc import Iterable, Iterator
from itertools import groupby

from contract.hashing import NO_HASH
from quire.v1 import kv_pb2
from scheduler_svc.core.space.cache_watcher import CacheTier
from scheduler_svc.domain import split_salt
from scheduler_svc.kv_events.index import Change, KvBlock


def changes_to_proto(changes: Iterable[Change]) -> Iterator[kv_pb2.KvEvent]:
    """Convert changes to events, in order.

    Consecutive changes share an event if all of them remove blocks from one tier, or if all of them
    store blocks in one tier with one salt. Blocks with unknown tokens get separate events, as in
    `blocks_to_proto`.
    """
    for (tier, is_stored, salt, is_known), run in groupby(changes, _kind):
        blocks = [change.block for change in run]
        if is_stored:
            yield stored_to_proto(tier, salt, blocks, is_known=is_known)
        else:
            hashes = b"".join([block.block_hash for block in blocks])
            removed = kv_pb2.KvBlocksRemoved(tier=f"KV_TIER_{tier.name}", block_hashes=hashes)
            yield kv_pb2.KvEvent(removed=removed)


def _kind(change: Change) -> tuple[CacheTier, bool, str, bool]:
    block, tier, is_stored = change
    if not is_stored:
        return tier, False, "", False
    return tier, True, block.salt, bool(block.token_bytes)


def blocks_to_proto(blocks: Iterable[KvBlock]) -> Iterator[kv_pb2.KvEvent]:
    """Make `stored` events. The blocks of an event are in one tier and have the same salt.

    Blocks with unknown tokens get separate events, because an event lists the tokens of all its
    blocks or of none.
    """
    alike: dict[tuple[CacheTier, str, bool], list[KvBlock]] = {}
    for block in blocks:
        for tier in block.tiers:
            alike.setdefault((tier, block.salt, bool(block.token_bytes)), []).append(block)
    for (tier, salt, is_known), some in alike.items():
        yield stored_to_proto(tier, salt, some, is_known=is_known)


def stored_to_proto(
    tier: CacheTier, salt: str, blocks: list[KvBlock], *, is_known: bool
) -> kv_pb2.KvEvent:
    """Make a `stored` event of blocks with one salt; `is_known`: the blocks' tokens are known."""
    stored = kv_pb2.KvBlocksStored(
        tier=f"KV_TIER_{tier.name}", block_hashes=b"".join([block.block_hash for block in blocks])
    )
    if is_known:
        stored.parent_hashes = b"".join([block.parent or NO_HASH for block in blocks])
        stored.token_ids = b"".join([block.token_bytes for block in blocks])
        stored.adapter, stored.cache_salt = split_salt(salt)
    return kv_pb2.KvEvent(stored=stored)
