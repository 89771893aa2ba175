from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvSnapshotReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_SNAPSHOT_REASON_UNSPECIFIED: _ClassVar[KvSnapshotReason]
    KV_SNAPSHOT_REASON_FIRST: _ClassVar[KvSnapshotReason]
    KV_SNAPSHOT_REASON_FELL_BEHIND: _ClassVar[KvSnapshotReason]

class KvTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_TIER_UNSPECIFIED: _ClassVar[KvTier]
    KV_TIER_DEVICE: _ClassVar[KvTier]
    KV_TIER_HOST: _ClassVar[KvTier]
    KV_TIER_DISK: _ClassVar[KvTier]

class KvBlockState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_BLOCK_STATE_UNSPECIFIED: _ClassVar[KvBlockState]
    KV_BLOCK_STATE_FREE: _ClassVar[KvBlockState]
    KV_BLOCK_STATE_CACHED: _ClassVar[KvBlockState]
    KV_BLOCK_STATE_PINNED: _ClassVar[KvBlockState]
    KV_BLOCK_STATE_HELD: _ClassVar[KvBlockState]
    KV_BLOCK_STATE_SHARED: _ClassVar[KvBlockState]
    KV_BLOCK_STATE_RETIRED: _ClassVar[KvBlockState]

class SequenceStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEQUENCE_STATUS_UNSPECIFIED: _ClassVar[SequenceStatus]
    SEQUENCE_STATUS_WAITING: _ClassVar[SequenceStatus]
    SEQUENCE_STATUS_SWAPPED: _ClassVar[SequenceStatus]
    SEQUENCE_STATUS_SIBLING: _ClassVar[SequenceStatus]
    SEQUENCE_STATUS_PREFILL: _ClassVar[SequenceStatus]
    SEQUENCE_STATUS_DECODE: _ClassVar[SequenceStatus]
    SEQUENCE_STATUS_MIGRATING: _ClassVar[SequenceStatus]
    SEQUENCE_STATUS_FETCHING: _ClassVar[SequenceStatus]
    SEQUENCE_STATUS_SPARE: _ClassVar[SequenceStatus]
KV_SNAPSHOT_REASON_UNSPECIFIED: KvSnapshotReason
KV_SNAPSHOT_REASON_FIRST: KvSnapshotReason
KV_SNAPSHOT_REASON_FELL_BEHIND: KvSnapshotReason
KV_TIER_UNSPECIFIED: KvTier
KV_TIER_DEVICE: KvTier
KV_TIER_HOST: KvTier
KV_TIER_DISK: KvTier
KV_BLOCK_STATE_UNSPECIFIED: KvBlockState
KV_BLOCK_STATE_FREE: KvBlockState
KV_BLOCK_STATE_CACHED: KvBlockState
KV_BLOCK_STATE_PINNED: KvBlockState
KV_BLOCK_STATE_HELD: KvBlockState
KV_BLOCK_STATE_SHARED: KvBlockState
KV_BLOCK_STATE_RETIRED: KvBlockState
SEQUENCE_STATUS_UNSPECIFIED: SequenceStatus
SEQUENCE_STATUS_WAITING: SequenceStatus
SEQUENCE_STATUS_SWAPPED: SequenceStatus
SEQUENCE_STATUS_SIBLING: SequenceStatus
SEQUENCE_STATUS_PREFILL: SequenceStatus
SEQUENCE_STATUS_DECODE: SequenceStatus
SEQUENCE_STATUS_MIGRATING: SequenceStatus
SEQUENCE_STATUS_FETCHING: SequenceStatus
SEQUENCE_STATUS_SPARE: SequenceStatus

class WatchKvRequest(_message.Message):
    __slots__ = ("worker", "model")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    worker: str
    model: str
    def __init__(self, worker: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class WatchKvResponse(_message.Message):
    __slots__ = ("worker", "epoch", "sequence", "block_size", "events")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    epoch: int
    sequence: int
    block_size: int
    events: _containers.RepeatedCompositeFieldContainer[KvEvent]
    def __init__(self, worker: _Optional[str] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., block_size: _Optional[int] = ..., events: _Optional[_Iterable[_Union[KvEvent, _Mapping]]] = ...) -> None: ...

class KvEvent(_message.Message):
    __slots__ = ("begin", "end", "stored", "removed", "cleared")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    begin: KvSnapshotBegin
    end: KvSnapshotEnd
    stored: KvBlocksStored
    removed: KvBlocksRemoved
    cleared: KvCacheCleared
    def __init__(self, begin: _Optional[_Union[KvSnapshotBegin, _Mapping]] = ..., end: _Optional[_Union[KvSnapshotEnd, _Mapping]] = ..., stored: _Optional[_Union[KvBlocksStored, _Mapping]] = ..., removed: _Optional[_Union[KvBlocksRemoved, _Mapping]] = ..., cleared: _Optional[_Union[KvCacheCleared, _Mapping]] = ...) -> None: ...

class KvSnapshotBegin(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: KvSnapshotReason
    def __init__(self, reason: _Optional[_Union[KvSnapshotReason, str]] = ...) -> None: ...

class KvSnapshotEnd(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class KvBlocksStored(_message.Message):
    __slots__ = ("tier", "block_hashes", "parent_hashes", "token_ids", "cache_salt", "adapter")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASHES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    tier: KvTier
    block_hashes: bytes
    parent_hashes: bytes
    token_ids: bytes
    cache_salt: str
    adapter: str
    def __init__(self, tier: _Optional[_Union[KvTier, str]] = ..., block_hashes: _Optional[bytes] = ..., parent_hashes: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., cache_salt: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class KvBlocksRemoved(_message.Message):
    __slots__ = ("tier", "block_hashes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    tier: KvTier
    block_hashes: bytes
    def __init__(self, tier: _Optional[_Union[KvTier, str]] = ..., block_hashes: _Optional[bytes] = ...) -> None: ...

class KvCacheCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvQuery(_message.Message):
    __slots__ = ("worker", "first_seq_id", "max_sequences", "first_block", "max_blocks", "ref_counts", "block_tables")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REF_COUNTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLES_FIELD_NUMBER: _ClassVar[int]
    worker: str
    first_seq_id: int
    max_sequences: int
    first_block: int
    max_blocks: int
    ref_counts: bool
    block_tables: bool
    def __init__(self, worker: _Optional[str] = ..., first_seq_id: _Optional[int] = ..., max_sequences: _Optional[int] = ..., first_block: _Optional[int] = ..., max_blocks: _Optional[int] = ..., ref_counts: bool = ..., block_tables: bool = ...) -> None: ...

class WorkerKv(_message.Message):
    __slots__ = ("worker", "block_size", "block_bytes", "tiers", "sequences", "num_sequences", "next_seq_id")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    worker: str
    block_size: int
    block_bytes: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierKv]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceKv]
    num_sequences: int
    next_seq_id: int
    def __init__(self, worker: _Optional[str] = ..., block_size: _Optional[int] = ..., block_bytes: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierKv, _Mapping]]] = ..., sequences: _Optional[_Iterable[_Union[SequenceKv, _Mapping]]] = ..., num_sequences: _Optional[int] = ..., next_seq_id: _Optional[int] = ...) -> None: ...

class TierKv(_message.Message):
    __slots__ = ("tier", "num_blocks", "num_held", "num_shared", "num_cached", "num_pinned", "num_free", "states", "ref_counts", "next_block", "num_retired")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_PINNED_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    REF_COUNTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_RETIRED_FIELD_NUMBER: _ClassVar[int]
    tier: KvTier
    num_blocks: int
    num_held: int
    num_shared: int
    num_cached: int
    num_pinned: int
    num_free: int
    states: bytes
    ref_counts: bytes
    next_block: int
    num_retired: int
    def __init__(self, tier: _Optional[_Union[KvTier, str]] = ..., num_blocks: _Optional[int] = ..., num_held: _Optional[int] = ..., num_shared: _Optional[int] = ..., num_cached: _Optional[int] = ..., num_pinned: _Optional[int] = ..., num_free: _Optional[int] = ..., states: _Optional[bytes] = ..., ref_counts: _Optional[bytes] = ..., next_block: _Optional[int] = ..., num_retired: _Optional[int] = ...) -> None: ...

class SequenceKv(_message.Message):
    __slots__ = ("seq_id", "request_id", "output_index", "status", "num_tokens", "num_prompt_tokens", "num_computed_tokens", "num_cached_tokens", "num_device_blocks", "num_host_blocks", "num_shared_blocks", "device_block_ids", "host_block_ids", "num_disk_blocks", "disk_block_ids")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
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
    num_shared_blocks: int
    device_block_ids: bytes
    host_block_ids: bytes
    num_disk_blocks: int
    disk_block_ids: bytes
    def __init__(self, seq_id: _Optional[int] = ..., request_id: _Optional[str] = ..., output_index: _Optional[int] = ..., status: _Optional[_Union[SequenceStatus, str]] = ..., num_tokens: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_device_blocks: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., num_shared_blocks: _Optional[int] = ..., device_block_ids: _Optional[bytes] = ..., host_block_ids: _Optional[bytes] = ..., num_disk_blocks: _Optional[int] = ..., disk_block_ids: _Optional[bytes] = ...) -> None: ...
