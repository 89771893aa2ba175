"""Describes the blocks of a core, by tier and by sequence; changes nothing."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum, IntEnum
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt

from contract.arrays import Int32Array, ints
from scheduler_svc.core.interface.request import SeqId
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SeqStatus, Sequence
from scheduler_svc.core.space.blocks import (
    BlockIdT,
    BlockPool,
    DeviceBlockId,
    DiskBlockId,
    HostBlockId,
)

MAX_SEQUENCES: Final = 1024
"""The limit on sequences in one description."""
MAX_TABLE_BLOCKS: Final = 65_536
"""The limit on block table entries in one description; a single sequence may exceed it."""
MAX_BLOCKS: Final = 65_536
"""The limit on block states per tier in one description."""


class Tier(Enum):
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class BlockState(IntEnum):
    """The state of a block; if several apply, the one with the greatest number is reported."""

    FREE = 1
    CACHED = 2
    PINNED = 3
    HELD = 4
    SHARED = 5
    RETIRED = 6


@dataclass(frozen=True, slots=True)
class Query:
    """The part of a core to describe.

    `max_sequences` may be at most `MAX_SEQUENCES`, and `max_blocks` at most `MAX_BLOCKS`.
    """

    first_seq_id: int = 0
    max_sequences: int = 256
    first_block: int = 0
    max_blocks: int = MAX_BLOCKS
    with_ref_counts: bool = False
    with_block_tables: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TierDescription:
    """The blocks of one tier. The counts cover all blocks; the arrays cover the queried blocks."""

    tier: Tier
    num_blocks: int
    state_to_num_blocks: dict[BlockState, int]
    states: npt.NDArray[np.uint8]
    """uint8[N]: the `BlockState` of each block from `Query.first_block` on."""
    ref_counts: Int32Array
    """int32[N], parallel to `states`: the holders of each block, not counting pins. Empty unless
    queried."""
    next_block: int | None
    """The first block after the described ones; None: no block follows, or none was queried."""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceDescription:
    seq_id: SeqId
    request_id: str
    output_index: int
    status: SeqStatus
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens with KV in any tier."""
    num_cached_tokens: int
    num_device_blocks: int
    num_host_blocks: int
    num_disk_blocks: int
    num_shared_blocks: int
    """Number of device blocks that the sequence shares with other holders, not counting pins."""
    device_block_ids: Int32Array
    """The block table without null blocks; empty unless queried."""
    host_block_ids: Int32Array
    disk_block_ids: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """A description of a core between two steps."""

    block_size: int
    bytes_per_block: int
    tiers: tuple[TierDescription, ...]
    sequences: tuple[SequenceDescription, ...]
    """Sorted by `seq_id`."""
    num_sequences: int
    """Number of all live sequences, described or not."""
    next_seq_id: SeqId | None
    """The first sequence after the described ones; None: no sequence follows."""


def describe(core: Scheduler, query: Query) -> Description:
    """Describe a core; takes time in proportion to its blocks and live sequences.

    Raises:
        ValueError: A number of the query exceeds its limit.
    """
    _check(query)
    live = sorted(core.live, key=lambda seq: seq.seq_id)
    wanted = [seq for seq in live if seq.seq_id >= query.first_seq_id]
    described = tuple(islice(_sequences(core, wanted, query), query.max_sequences))
    left_out = wanted[len(described) :]
    return Description(
        block_size=core.config.block_size,
        bytes_per_block=core.config.bytes_per_block,
        tiers=tuple(_tiers(core, query)),
        sequences=described,
        num_sequences=len(live),
        next_seq_id=left_out[0].seq_id if left_out else None,
    )


def _check(query: Query) -> None:
    limits = {"max_sequences": MAX_SEQUENCES, "max_blocks": MAX_BLOCKS}
    for name, limit in limits.items():
        if not 0 <= getattr(query, name) <= limit:
            raise ValueError(f"{name} is {getattr(query, name)}; it must be in [0, {limit}]")


def _tiers(core: Scheduler, query: Query) -> Iterator[TierDescription]:
    pinned = list(core.pins)
    num_null = core.groups.num_null
    yield _describe_pool(Tier.DEVICE, core.pool, pinned, query, num_null)
    if core.config.num_host_blocks:
        yield _describe_pool(Tier.HOST, core.tier.pool, [], query)
    if core.config.num_disk_blocks:
        yield _describe_pool(Tier.DISK, core.tier.disk.pool, [], query)


def _describe_pool(
    tier: Tier, pool: BlockPool[BlockIdT], pinned: Seq[int], query: Query, num_null: int = 0
) -> TierDescription:
    ref_counts = pool.ref_counts.copy()
    ref_counts[pinned] -= 1  # pins do not count as holders here
    ref_counts[:num_null] = 0  # the core holds the null block only to keep it from use
    has_hash = np.array([block_hash is not None for block_hash in pool.books.hashes], np.bool_)
    states = np.full(pool.num_blocks, BlockState.FREE, np.uint8)
    states[has_hash] = BlockState.CACHED
    states[pinned] = BlockState.PINNED
    states[ref_counts == 1] = BlockState.HELD
    states[ref_counts > 1] = BlockState.SHARED
    states[pool.num_usable :][ref_counts[pool.num_usable :] == 0] = BlockState.RETIRED
    states[:num_null] = BlockState.RETIRED
    counts = np.bincount(states, minlength=max(BlockState) + 1).tolist()
    end = query.first_block + query.max_blocks
    return TierDescription(
        tier=tier,
        num_blocks=pool.num_blocks,
        state_to_num_blocks={state: counts[state] for state in BlockState},
        states=states[query.first_block : end],
        ref_counts=ref_counts[query.first_block : end] if query.with_ref_counts else ints([]),
        next_block=end if query.max_blocks and end < pool.num_blocks else None,
    )


def _sequences(
    core: Scheduler, seqs: list[Sequence], query: Query
) -> Iterator[SequenceDescription]:
    """Yield descriptions of sequences while their block tables fit into `MAX_TABLE_BLOCKS`."""
    num_table_blocks = 0
    for seq in seqs:
        if query.with_block_tables:
            num_blocks = sum(map(len, _tables(core, seq)))
            if num_table_blocks and num_table_blocks + num_blocks > MAX_TABLE_BLOCKS:
                return
            num_table_blocks += num_blocks
        yield _describe_sequence(core, seq, with_tables=query.with_block_tables)


def _describe_sequence(core: Scheduler, seq: Sequence, *, with_tables: bool) -> SequenceDescription:
    num_tokens, num_computed = len(seq.token_ids), seq.num_computed_tokens
    if seq.row is not None:
        num_tokens = core.rows.num_tokens(seq.row)
        num_computed = core.running.num_computed_tokens(seq)
    elif not (seq.host_block_ids or seq.disk_block_ids):
        num_computed = 0
    device, host, disk = map(ints, _tables(core, seq) if with_tables else ((), (), ()))
    pool, pins = core.pool, core.pins
    table = _tables(core, seq)[0]
    num_shared = sum(pool.ref_count(block) - (block in pins) > 1 for block in table)
    return SequenceDescription(
        seq_id=seq.seq_id,
        request_id=seq.request.request_id,
        output_index=seq.output_index,
        status=seq.status,
        num_tokens=num_tokens,
        num_prompt_tokens=seq.num_prompt_tokens,
        num_computed_tokens=num_computed,
        num_cached_tokens=seq.num_cached_tokens,
        num_device_blocks=len(table),
        num_host_blocks=len(seq.host_block_ids),
        num_disk_blocks=len(seq.disk_block_ids),
        num_shared_blocks=num_shared,
        device_block_ids=device,
        host_block_ids=host,
        disk_block_ids=disk,
    )


def _tables(
    core: Scheduler, seq: Sequence
) -> tuple[Seq[DeviceBlockId], Seq[HostBlockId], Seq[DiskBlockId]]:
    """Return the blocks that a sequence holds in each tier; places without a block are left out."""
    return core.groups.held(seq.block_ids), seq.host_block_ids, seq.disk_block_ids
