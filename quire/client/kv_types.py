"""Who holds which KV blocks, as `Client.describe_kv` gives it."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class KvTier(StrEnum):
    """Where blocks are."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class KvBlockState(IntEnum):
    """What a block is; of those that are true of it the greatest. Numbers are the contract's."""

    BLANK = 1
    CACHED = 2
    PINNED = 3
    HELD = 4
    SHARED = 5
    RETIRED = 6


class SequenceStatus(StrEnum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    SWAPPED = "swapped"
    SIBLING = "sibling"
    PREFILL = "prefill"
    DECODE = "decode"
    MIGRATING = "migrating"
    FETCHING = "fetching"


@dataclass(frozen=True, slots=True)
class TierKv:
    """The blocks of one tier; each is counted once."""

    tier: KvTier
    num_blocks: int
    num_held: int
    """Held by one."""
    num_shared: int
    """Held by several."""
    num_cached: int
    num_pinned: int
    num_blank: int
    num_retired: int
    """Of a pool that shrinks: those that nobody holds any more, and that are about to go."""
    states: bytes
    """A `KvBlockState` for each block from the first asked for."""
    ref_counts: tuple[int, ...]
    """Parallel to it, or empty."""
    next_block: int | None
    """The first block that is not in `states`; None: none is missing."""


@dataclass(frozen=True, slots=True)
class SequenceKv:
    """One live sequence."""

    seq_id: int
    request_id: str
    output_index: int
    status: SequenceStatus
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_device_blocks: int
    num_host_blocks: int
    num_disk_blocks: int
    num_shared_blocks: int
    device_block_ids: tuple[int, ...]
    """Its block table, if asked for."""
    host_block_ids: tuple[int, ...]
    disk_block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerKv:
    """The KV of one worker."""

    worker: str
    """Its target, as the scheduler was told."""
    block_size: int
    block_bytes: int
    tiers: tuple[TierKv, ...]
    sequences: tuple[SequenceKv, ...]
    num_sequences: int
    """All that are live."""
    next_seq_id: int | None
    """The first sequence that is not in `sequences`; None: none is missing."""
