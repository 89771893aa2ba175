from quire.v1 import common_pb2 as _common_pb2
from quire.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RecordingHeader(_message.Message):
    __slots__ = ("format_version", "quire_version", "worker_id", "epoch", "started_at_s", "config_json")
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    QUIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_S_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    quire_version: str
    worker_id: str
    epoch: int
    started_at_s: float
    config_json: str
    def __init__(self, format_version: _Optional[int] = ..., quire_version: _Optional[str] = ..., worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., started_at_s: _Optional[float] = ..., config_json: _Optional[str] = ...) -> None: ...

class RecordingEntry(_message.Message):
    __slots__ = ("submit", "cancel", "cancel_source", "schedule", "update", "defragment", "inherit", "shrink", "resize", "memory_level", "end", "begin_export", "end_export", "begin_import", "end_import", "raised")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    CANCEL_SOURCE_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    DEFRAGMENT_FIELD_NUMBER: _ClassVar[int]
    INHERIT_FIELD_NUMBER: _ClassVar[int]
    SHRINK_FIELD_NUMBER: _ClassVar[int]
    RESIZE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LEVEL_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    BEGIN_EXPORT_FIELD_NUMBER: _ClassVar[int]
    END_EXPORT_FIELD_NUMBER: _ClassVar[int]
    BEGIN_IMPORT_FIELD_NUMBER: _ClassVar[int]
    END_IMPORT_FIELD_NUMBER: _ClassVar[int]
    RAISED_FIELD_NUMBER: _ClassVar[int]
    submit: RecordedSubmit
    cancel: RecordedCancel
    cancel_source: RecordedCancelSource
    schedule: RecordedSchedule
    update: RecordedUpdate
    defragment: RecordedDefragment
    inherit: RecordedInherit
    shrink: RecordedShrink
    resize: RecordedResize
    memory_level: RecordedMemoryLevel
    end: RecordingEnd
    begin_export: RecordedBeginExport
    end_export: RecordedEndExport
    begin_import: RecordedBeginImport
    end_import: RecordedEndImport
    raised: str
    def __init__(self, submit: _Optional[_Union[RecordedSubmit, _Mapping]] = ..., cancel: _Optional[_Union[RecordedCancel, _Mapping]] = ..., cancel_source: _Optional[_Union[RecordedCancelSource, _Mapping]] = ..., schedule: _Optional[_Union[RecordedSchedule, _Mapping]] = ..., update: _Optional[_Union[RecordedUpdate, _Mapping]] = ..., defragment: _Optional[_Union[RecordedDefragment, _Mapping]] = ..., inherit: _Optional[_Union[RecordedInherit, _Mapping]] = ..., shrink: _Optional[_Union[RecordedShrink, _Mapping]] = ..., resize: _Optional[_Union[RecordedResize, _Mapping]] = ..., memory_level: _Optional[_Union[RecordedMemoryLevel, _Mapping]] = ..., end: _Optional[_Union[RecordingEnd, _Mapping]] = ..., begin_export: _Optional[_Union[RecordedBeginExport, _Mapping]] = ..., end_export: _Optional[_Union[RecordedEndExport, _Mapping]] = ..., begin_import: _Optional[_Union[RecordedBeginImport, _Mapping]] = ..., end_import: _Optional[_Union[RecordedEndImport, _Mapping]] = ..., raised: _Optional[str] = ...) -> None: ...

class RecordedSubmit(_message.Message):
    __slots__ = ("now", "source", "first_seq_key", "request_id", "prompt_token_ids", "n", "max_tokens", "sampling", "cache_salt", "traceparent", "outputs", "more_json")
    NOW_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQ_KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    MORE_JSON_FIELD_NUMBER: _ClassVar[int]
    now: float
    source: int
    first_seq_key: int
    request_id: str
    prompt_token_ids: bytes
    n: int
    max_tokens: int
    sampling: bytes
    cache_salt: str
    traceparent: str
    outputs: _containers.RepeatedCompositeFieldContainer[RecordedOutput]
    more_json: str
    def __init__(self, now: _Optional[float] = ..., source: _Optional[int] = ..., first_seq_key: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., n: _Optional[int] = ..., max_tokens: _Optional[int] = ..., sampling: _Optional[bytes] = ..., cache_salt: _Optional[str] = ..., traceparent: _Optional[str] = ..., outputs: _Optional[_Iterable[_Union[RecordedOutput, _Mapping]]] = ..., more_json: _Optional[str] = ...) -> None: ...

class RecordedOutput(_message.Message):
    __slots__ = ("token_ids", "finished")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    finished: bool
    def __init__(self, token_ids: _Optional[bytes] = ..., finished: bool = ...) -> None: ...

class RecordedInherit(_message.Message):
    __slots__ = ("now", "holdings")
    NOW_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    now: float
    holdings: _worker_pb2.ReadHoldingsResponse
    def __init__(self, now: _Optional[float] = ..., holdings: _Optional[_Union[_worker_pb2.ReadHoldingsResponse, _Mapping]] = ...) -> None: ...

class RecordedCancel(_message.Message):
    __slots__ = ("source", "seq_keys")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SEQ_KEYS_FIELD_NUMBER: _ClassVar[int]
    source: int
    seq_keys: bytes
    def __init__(self, source: _Optional[int] = ..., seq_keys: _Optional[bytes] = ...) -> None: ...

class RecordedCancelSource(_message.Message):
    __slots__ = ("source",)
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    source: int
    def __init__(self, source: _Optional[int] = ...) -> None: ...

class RecordedDefragment(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RecordedShrink(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class RecordedResize(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class RecordedMemoryLevel(_message.Message):
    __slots__ = ("level",)
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: _common_pb2.MemoryLevel
    def __init__(self, level: _Optional[_Union[_common_pb2.MemoryLevel, str]] = ...) -> None: ...

class RecordedSchedule(_message.Message):
    __slots__ = ("now", "plan", "max_paced_tokens", "max_prompt_tokens")
    NOW_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    MAX_PACED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    now: float
    plan: RecordedPlan
    max_paced_tokens: int
    max_prompt_tokens: int
    def __init__(self, now: _Optional[float] = ..., plan: _Optional[_Union[RecordedPlan, _Mapping]] = ..., max_paced_tokens: _Optional[int] = ..., max_prompt_tokens: _Optional[int] = ...) -> None: ...

class RecordedPlan(_message.Message):
    __slots__ = ("step_id", "released_rows", "new_sequences", "appended_rows", "appended_block_ids", "copy_src_block_ids", "copy_dst_block_ids", "chunk_rows", "chunk_lens", "num_decodes", "num_scheduled_tokens", "swap_out_src_block_ids", "swap_out_dst_block_ids", "swap_in_src_block_ids", "swap_in_dst_block_ids", "renamed_src_block_ids", "renamed_dst_block_ids", "disk_store_src_block_ids", "disk_store_dst_block_ids", "disk_load_src_block_ids", "disk_load_dst_block_ids")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    RELEASED_ROWS_FIELD_NUMBER: _ClassVar[int]
    NEW_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    APPENDED_ROWS_FIELD_NUMBER: _ClassVar[int]
    APPENDED_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    COPY_SRC_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    COPY_DST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_ROWS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_LENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODES_FIELD_NUMBER: _ClassVar[int]
    NUM_SCHEDULED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_SRC_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_DST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_SRC_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_DST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    RENAMED_SRC_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    RENAMED_DST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    DISK_STORE_SRC_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    DISK_STORE_DST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    DISK_LOAD_SRC_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    DISK_LOAD_DST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    released_rows: bytes
    new_sequences: _containers.RepeatedCompositeFieldContainer[RecordedNewSequence]
    appended_rows: bytes
    appended_block_ids: bytes
    copy_src_block_ids: bytes
    copy_dst_block_ids: bytes
    chunk_rows: bytes
    chunk_lens: bytes
    num_decodes: int
    num_scheduled_tokens: int
    swap_out_src_block_ids: bytes
    swap_out_dst_block_ids: bytes
    swap_in_src_block_ids: bytes
    swap_in_dst_block_ids: bytes
    renamed_src_block_ids: bytes
    renamed_dst_block_ids: bytes
    disk_store_src_block_ids: bytes
    disk_store_dst_block_ids: bytes
    disk_load_src_block_ids: bytes
    disk_load_dst_block_ids: bytes
    def __init__(self, step_id: _Optional[int] = ..., released_rows: _Optional[bytes] = ..., new_sequences: _Optional[_Iterable[_Union[RecordedNewSequence, _Mapping]]] = ..., appended_rows: _Optional[bytes] = ..., appended_block_ids: _Optional[bytes] = ..., copy_src_block_ids: _Optional[bytes] = ..., copy_dst_block_ids: _Optional[bytes] = ..., chunk_rows: _Optional[bytes] = ..., chunk_lens: _Optional[bytes] = ..., num_decodes: _Optional[int] = ..., num_scheduled_tokens: _Optional[int] = ..., swap_out_src_block_ids: _Optional[bytes] = ..., swap_out_dst_block_ids: _Optional[bytes] = ..., swap_in_src_block_ids: _Optional[bytes] = ..., swap_in_dst_block_ids: _Optional[bytes] = ..., renamed_src_block_ids: _Optional[bytes] = ..., renamed_dst_block_ids: _Optional[bytes] = ..., disk_store_src_block_ids: _Optional[bytes] = ..., disk_store_dst_block_ids: _Optional[bytes] = ..., disk_load_src_block_ids: _Optional[bytes] = ..., disk_load_dst_block_ids: _Optional[bytes] = ...) -> None: ...

class RecordedNewSequence(_message.Message):
    __slots__ = ("seq_id", "row", "num_tokens", "tokens_crc", "num_computed_tokens", "block_ids")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_CRC_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    row: int
    num_tokens: int
    tokens_crc: int
    num_computed_tokens: int
    block_ids: bytes
    def __init__(self, seq_id: _Optional[int] = ..., row: _Optional[int] = ..., num_tokens: _Optional[int] = ..., tokens_crc: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., block_ids: _Optional[bytes] = ...) -> None: ...

class RecordedUpdate(_message.Message):
    __slots__ = ("step_id", "sampled_rows", "sampled_token_ids", "stopped_rows", "failed_rows", "failed_swap_in_block_ids", "stored_disk_block_ids", "failed_disk_block_ids", "loaded_host_block_ids", "failed_host_block_ids", "candidate_rows", "candidate_counts", "candidate_token_ids", "candidate_logprobs", "stuck_rows", "now")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_ROWS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOPPED_ROWS_FIELD_NUMBER: _ClassVar[int]
    FAILED_ROWS_FIELD_NUMBER: _ClassVar[int]
    FAILED_SWAP_IN_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    STORED_DISK_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    FAILED_DISK_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    LOADED_HOST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    FAILED_HOST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_ROWS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STUCK_ROWS_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    sampled_rows: bytes
    sampled_token_ids: bytes
    stopped_rows: bytes
    failed_rows: bytes
    failed_swap_in_block_ids: bytes
    stored_disk_block_ids: bytes
    failed_disk_block_ids: bytes
    loaded_host_block_ids: bytes
    failed_host_block_ids: bytes
    candidate_rows: bytes
    candidate_counts: bytes
    candidate_token_ids: bytes
    candidate_logprobs: bytes
    stuck_rows: bytes
    now: float
    def __init__(self, step_id: _Optional[int] = ..., sampled_rows: _Optional[bytes] = ..., sampled_token_ids: _Optional[bytes] = ..., stopped_rows: _Optional[bytes] = ..., failed_rows: _Optional[bytes] = ..., failed_swap_in_block_ids: _Optional[bytes] = ..., stored_disk_block_ids: _Optional[bytes] = ..., failed_disk_block_ids: _Optional[bytes] = ..., loaded_host_block_ids: _Optional[bytes] = ..., failed_host_block_ids: _Optional[bytes] = ..., candidate_rows: _Optional[bytes] = ..., candidate_counts: _Optional[bytes] = ..., candidate_token_ids: _Optional[bytes] = ..., candidate_logprobs: _Optional[bytes] = ..., stuck_rows: _Optional[bytes] = ..., now: _Optional[float] = ...) -> None: ...

class RecordedBeginExport(_message.Message):
    __slots__ = ("source", "first_seq_key")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQ_KEY_FIELD_NUMBER: _ClassVar[int]
    source: int
    first_seq_key: int
    def __init__(self, source: _Optional[int] = ..., first_seq_key: _Optional[int] = ...) -> None: ...

class RecordedEndExport(_message.Message):
    __slots__ = ("export_id", "leaves")
    EXPORT_ID_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    export_id: int
    leaves: bool
    def __init__(self, export_id: _Optional[int] = ..., leaves: bool = ...) -> None: ...

class RecordedBeginImport(_message.Message):
    __slots__ = ("request", "block_size", "bytes_per_block", "sequences")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    request: RecordedSubmit
    block_size: int
    bytes_per_block: int
    sequences: _containers.RepeatedCompositeFieldContainer[RecordedMovedSequence]
    def __init__(self, request: _Optional[_Union[RecordedSubmit, _Mapping]] = ..., block_size: _Optional[int] = ..., bytes_per_block: _Optional[int] = ..., sequences: _Optional[_Iterable[_Union[RecordedMovedSequence, _Mapping]]] = ...) -> None: ...

class RecordedMovedSequence(_message.Message):
    __slots__ = ("output_index", "host_block_ids", "num_computed_tokens", "num_charged_tokens", "num_cached_tokens", "was_admitted")
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHARGED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAS_ADMITTED_FIELD_NUMBER: _ClassVar[int]
    output_index: int
    host_block_ids: bytes
    num_computed_tokens: int
    num_charged_tokens: int
    num_cached_tokens: int
    was_admitted: bool
    def __init__(self, output_index: _Optional[int] = ..., host_block_ids: _Optional[bytes] = ..., num_computed_tokens: _Optional[int] = ..., num_charged_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., was_admitted: bool = ...) -> None: ...

class RecordedEndImport(_message.Message):
    __slots__ = ("import_id", "output_indices")
    IMPORT_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_INDICES_FIELD_NUMBER: _ClassVar[int]
    import_id: int
    output_indices: bytes
    def __init__(self, import_id: _Optional[int] = ..., output_indices: _Optional[bytes] = ...) -> None: ...

class RecordingEnd(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...
