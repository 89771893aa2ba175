from quire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]

class KvTransfer(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_TRANSFER_UNSPECIFIED: _ClassVar[KvTransfer]
    KV_TRANSFER_NIXL: _ClassVar[KvTransfer]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
KV_TRANSFER_UNSPECIFIED: KvTransfer
KV_TRANSFER_NIXL: KvTransfer

class ResizePoolRequest(_message.Message):
    __slots__ = ("epoch", "num_blocks")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    num_blocks: int
    def __init__(self, epoch: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class ResizePoolResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AwaitDrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AwaitDrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("epoch", "scheduler_id")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    scheduler_id: str
    def __init__(self, epoch: _Optional[int] = ..., scheduler_id: _Optional[str] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("worker", "is_unloaded", "former_epoch")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    IS_UNLOADED_FIELD_NUMBER: _ClassVar[int]
    FORMER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerInfo
    is_unloaded: bool
    former_epoch: int
    def __init__(self, worker: _Optional[_Union[WorkerInfo, _Mapping]] = ..., is_unloaded: bool = ..., former_epoch: _Optional[int] = ...) -> None: ...

class ReadHoldingsRequest(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class ReadHoldingsResponse(_message.Message):
    __slots__ = ("rows", "device", "host", "disk", "pins")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[HeldRow]
    device: HeldBlocks
    host: HeldBlocks
    disk: HeldBlocks
    pins: HeldPins
    def __init__(self, rows: _Optional[_Iterable[_Union[HeldRow, _Mapping]]] = ..., device: _Optional[_Union[HeldBlocks, _Mapping]] = ..., host: _Optional[_Union[HeldBlocks, _Mapping]] = ..., disk: _Optional[_Union[HeldBlocks, _Mapping]] = ..., pins: _Optional[_Union[HeldPins, _Mapping]] = ...) -> None: ...

class HeldRow(_message.Message):
    __slots__ = ("identity", "token_ids", "num_computed_tokens", "block_ids", "has_stopped", "had_logprobs", "note", "logprobs")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_STOPPED_FIELD_NUMBER: _ClassVar[int]
    HAD_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    identity: bytes
    token_ids: bytes
    num_computed_tokens: int
    block_ids: bytes
    has_stopped: bool
    had_logprobs: bool
    note: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    def __init__(self, identity: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., num_computed_tokens: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., has_stopped: bool = ..., had_logprobs: bool = ..., note: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class HeldBlocks(_message.Message):
    __slots__ = ("block_ids", "labels")
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    block_ids: bytes
    labels: bytes
    def __init__(self, block_ids: _Optional[bytes] = ..., labels: _Optional[bytes] = ...) -> None: ...

class HeldPins(_message.Message):
    __slots__ = ("labels", "left_s")
    LABELS_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    labels: bytes
    left_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, labels: _Optional[bytes] = ..., left_s: _Optional[_Iterable[float]] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "device", "model", "max_num_seqs", "max_num_batched_tokens", "num_blocks", "block_size", "block_bytes", "dtype", "num_host_blocks", "swap_bytes_per_s", "prefill_tokens_per_s", "num_disk_blocks", "disk_bytes_per_s", "instance_id", "takes_kv", "num_draft_tokens", "max_num_blocks", "min_num_blocks", "num_saturating_tokens", "host_is_device_memory", "can_unload", "kv_windows", "takes_whole_prompts", "role", "kv_chunks", "has_far_kv", "min_prompt_tokens")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    TAKES_KV_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MIN_NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SATURATING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_IS_DEVICE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    CAN_UNLOAD_FIELD_NUMBER: _ClassVar[int]
    KV_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    TAKES_WHOLE_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    KV_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    HAS_FAR_KV_FIELD_NUMBER: _ClassVar[int]
    MIN_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    device: str
    model: _common_pb2.ModelInfo
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    block_bytes: int
    dtype: str
    num_host_blocks: int
    swap_bytes_per_s: float
    prefill_tokens_per_s: float
    num_disk_blocks: int
    disk_bytes_per_s: float
    instance_id: int
    takes_kv: bool
    num_draft_tokens: int
    max_num_blocks: int
    min_num_blocks: int
    num_saturating_tokens: int
    host_is_device_memory: bool
    can_unload: bool
    kv_windows: _containers.RepeatedScalarFieldContainer[int]
    takes_whole_prompts: bool
    role: WorkerRole
    kv_chunks: _containers.RepeatedScalarFieldContainer[int]
    has_far_kv: bool
    min_prompt_tokens: int
    def __init__(self, worker_id: _Optional[str] = ..., device: _Optional[str] = ..., model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., block_bytes: _Optional[int] = ..., dtype: _Optional[str] = ..., num_host_blocks: _Optional[int] = ..., swap_bytes_per_s: _Optional[float] = ..., prefill_tokens_per_s: _Optional[float] = ..., num_disk_blocks: _Optional[int] = ..., disk_bytes_per_s: _Optional[float] = ..., instance_id: _Optional[int] = ..., takes_kv: bool = ..., num_draft_tokens: _Optional[int] = ..., max_num_blocks: _Optional[int] = ..., min_num_blocks: _Optional[int] = ..., num_saturating_tokens: _Optional[int] = ..., host_is_device_memory: bool = ..., can_unload: bool = ..., kv_windows: _Optional[_Iterable[int]] = ..., takes_whole_prompts: bool = ..., role: _Optional[_Union[WorkerRole, str]] = ..., kv_chunks: _Optional[_Iterable[int]] = ..., has_far_kv: bool = ..., min_prompt_tokens: _Optional[int] = ...) -> None: ...

class StepBatch(_message.Message):
    __slots__ = ("epoch", "step_id", "released_rows", "new_sequences", "appended_rows", "appended_block_ids", "kv_commands", "chunk_rows", "chunk_lens", "num_decodes", "renamed_src_block_ids", "renamed_dst_block_ids", "labelled_block_ids", "labels", "pinned_labels", "pinned_s", "placements")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    RELEASED_ROWS_FIELD_NUMBER: _ClassVar[int]
    NEW_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    APPENDED_ROWS_FIELD_NUMBER: _ClassVar[int]
    APPENDED_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    KV_COMMANDS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_ROWS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_LENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODES_FIELD_NUMBER: _ClassVar[int]
    RENAMED_SRC_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    RENAMED_DST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    LABELLED_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    PINNED_LABELS_FIELD_NUMBER: _ClassVar[int]
    PINNED_S_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step_id: int
    released_rows: bytes
    new_sequences: _containers.RepeatedCompositeFieldContainer[NewSequence]
    appended_rows: bytes
    appended_block_ids: bytes
    kv_commands: KvCommands
    chunk_rows: bytes
    chunk_lens: bytes
    num_decodes: int
    renamed_src_block_ids: bytes
    renamed_dst_block_ids: bytes
    labelled_block_ids: bytes
    labels: bytes
    pinned_labels: bytes
    pinned_s: _containers.RepeatedScalarFieldContainer[float]
    placements: bytes
    def __init__(self, epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., released_rows: _Optional[bytes] = ..., new_sequences: _Optional[_Iterable[_Union[NewSequence, _Mapping]]] = ..., appended_rows: _Optional[bytes] = ..., appended_block_ids: _Optional[bytes] = ..., kv_commands: _Optional[_Union[KvCommands, _Mapping]] = ..., chunk_rows: _Optional[bytes] = ..., chunk_lens: _Optional[bytes] = ..., num_decodes: _Optional[int] = ..., renamed_src_block_ids: _Optional[bytes] = ..., renamed_dst_block_ids: _Optional[bytes] = ..., labelled_block_ids: _Optional[bytes] = ..., labels: _Optional[bytes] = ..., pinned_labels: _Optional[bytes] = ..., pinned_s: _Optional[_Iterable[float]] = ..., placements: _Optional[bytes] = ...) -> None: ...

class NewSequence(_message.Message):
    __slots__ = ("seq_id", "row", "token_ids", "num_prompt_tokens", "num_computed_tokens", "block_ids", "sampling", "max_total_tokens", "traceparent", "output_index", "identity", "note")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    row: int
    token_ids: bytes
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: bytes
    sampling: _common_pb2.SamplingParams
    max_total_tokens: int
    traceparent: str
    output_index: int
    identity: bytes
    note: bytes
    def __init__(self, seq_id: _Optional[int] = ..., row: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., num_prompt_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., max_total_tokens: _Optional[int] = ..., traceparent: _Optional[str] = ..., output_index: _Optional[int] = ..., identity: _Optional[bytes] = ..., note: _Optional[bytes] = ...) -> None: ...

class SearchNote(_message.Message):
    __slots__ = ("beams", "hypotheses")
    BEAMS_FIELD_NUMBER: _ClassVar[int]
    HYPOTHESES_FIELD_NUMBER: _ClassVar[int]
    beams: _containers.RepeatedCompositeFieldContainer[NotedOutput]
    hypotheses: _containers.RepeatedCompositeFieldContainer[NotedOutput]
    def __init__(self, beams: _Optional[_Iterable[_Union[NotedOutput, _Mapping]]] = ..., hypotheses: _Optional[_Iterable[_Union[NotedOutput, _Mapping]]] = ...) -> None: ...

class NotedOutput(_message.Message):
    __slots__ = ("num_shared_tokens", "token_ids", "logprob")
    NUM_SHARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    num_shared_tokens: int
    token_ids: bytes
    logprob: float
    def __init__(self, num_shared_tokens: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprob: _Optional[float] = ...) -> None: ...

class KvCommands(_message.Message):
    __slots__ = ("copy_src_block_ids", "copy_dst_block_ids", "swap_out_src_block_ids", "swap_out_dst_block_ids", "swap_in_src_block_ids", "swap_in_dst_block_ids", "disk_store_src_block_ids", "disk_store_dst_block_ids", "disk_load_src_block_ids", "disk_load_dst_block_ids")
    COPY_SRC_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    COPY_DST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_SRC_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_DST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_SRC_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_DST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    DISK_STORE_SRC_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    DISK_STORE_DST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    DISK_LOAD_SRC_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    DISK_LOAD_DST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    copy_src_block_ids: bytes
    copy_dst_block_ids: bytes
    swap_out_src_block_ids: bytes
    swap_out_dst_block_ids: bytes
    swap_in_src_block_ids: bytes
    swap_in_dst_block_ids: bytes
    disk_store_src_block_ids: bytes
    disk_store_dst_block_ids: bytes
    disk_load_src_block_ids: bytes
    disk_load_dst_block_ids: bytes
    def __init__(self, copy_src_block_ids: _Optional[bytes] = ..., copy_dst_block_ids: _Optional[bytes] = ..., swap_out_src_block_ids: _Optional[bytes] = ..., swap_out_dst_block_ids: _Optional[bytes] = ..., swap_in_src_block_ids: _Optional[bytes] = ..., swap_in_dst_block_ids: _Optional[bytes] = ..., disk_store_src_block_ids: _Optional[bytes] = ..., disk_store_dst_block_ids: _Optional[bytes] = ..., disk_load_src_block_ids: _Optional[bytes] = ..., disk_load_dst_block_ids: _Optional[bytes] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("epoch", "step_id", "sampled_rows", "sampled_token_ids", "stopped_rows", "failed_rows", "logprobs", "execute_s", "failed_swap_in_block_ids", "stored_disk_block_ids", "failed_disk_block_ids", "loaded_host_block_ids", "failed_host_block_ids", "prompt_logprobs", "stuck_rows", "pooled")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_ROWS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOPPED_ROWS_FIELD_NUMBER: _ClassVar[int]
    FAILED_ROWS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EXECUTE_S_FIELD_NUMBER: _ClassVar[int]
    FAILED_SWAP_IN_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    STORED_DISK_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    FAILED_DISK_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    LOADED_HOST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    FAILED_HOST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STUCK_ROWS_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step_id: int
    sampled_rows: bytes
    sampled_token_ids: bytes
    stopped_rows: bytes
    failed_rows: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[SampledLogprob]
    execute_s: float
    failed_swap_in_block_ids: bytes
    stored_disk_block_ids: bytes
    failed_disk_block_ids: bytes
    loaded_host_block_ids: bytes
    failed_host_block_ids: bytes
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    stuck_rows: bytes
    pooled: _containers.RepeatedCompositeFieldContainer[PooledRow]
    def __init__(self, epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., sampled_rows: _Optional[bytes] = ..., sampled_token_ids: _Optional[bytes] = ..., stopped_rows: _Optional[bytes] = ..., failed_rows: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[SampledLogprob, _Mapping]]] = ..., execute_s: _Optional[float] = ..., failed_swap_in_block_ids: _Optional[bytes] = ..., stored_disk_block_ids: _Optional[bytes] = ..., failed_disk_block_ids: _Optional[bytes] = ..., loaded_host_block_ids: _Optional[bytes] = ..., failed_host_block_ids: _Optional[bytes] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ..., stuck_rows: _Optional[bytes] = ..., pooled: _Optional[_Iterable[_Union[PooledRow, _Mapping]]] = ...) -> None: ...

class PooledRow(_message.Message):
    __slots__ = ("row", "vector")
    ROW_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    row: int
    vector: bytes
    def __init__(self, row: _Optional[int] = ..., vector: _Optional[bytes] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("row", "position", "logprobs")
    ROW_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    row: int
    position: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    def __init__(self, row: _Optional[int] = ..., position: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class SampledLogprob(_message.Message):
    __slots__ = ("index", "logprob")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    index: int
    logprob: _common_pb2.TokenLogprob
    def __init__(self, index: _Optional[int] = ..., logprob: _Optional[_Union[_common_pb2.TokenLogprob, _Mapping]] = ...) -> None: ...

class DescribeDeviceRequest(_message.Message):
    __slots__ = ("epoch", "is_cut_off")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IS_CUT_OFF_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    is_cut_off: bool
    def __init__(self, epoch: _Optional[int] = ..., is_cut_off: bool = ...) -> None: ...

class DescribeDeviceResponse(_message.Message):
    __slots__ = ("worker", "epoch", "step_id", "num_rows_used", "has_scheduler", "memory_level", "is_unloaded", "num_heartbeats", "is_cut_off")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_USED_FIELD_NUMBER: _ClassVar[int]
    HAS_SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LEVEL_FIELD_NUMBER: _ClassVar[int]
    IS_UNLOADED_FIELD_NUMBER: _ClassVar[int]
    NUM_HEARTBEATS_FIELD_NUMBER: _ClassVar[int]
    IS_CUT_OFF_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerInfo
    epoch: int
    step_id: int
    num_rows_used: int
    has_scheduler: bool
    memory_level: _common_pb2.MemoryLevel
    is_unloaded: bool
    num_heartbeats: int
    is_cut_off: bool
    def __init__(self, worker: _Optional[_Union[WorkerInfo, _Mapping]] = ..., epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., num_rows_used: _Optional[int] = ..., has_scheduler: bool = ..., memory_level: _Optional[_Union[_common_pb2.MemoryLevel, str]] = ..., is_unloaded: bool = ..., num_heartbeats: _Optional[int] = ..., is_cut_off: bool = ...) -> None: ...

class ReadKvRequest(_message.Message):
    __slots__ = ("epoch", "host_block_ids", "kv_format", "instance_id", "transfer")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    host_block_ids: bytes
    kv_format: str
    instance_id: int
    transfer: KvTransfer
    def __init__(self, epoch: _Optional[int] = ..., host_block_ids: _Optional[bytes] = ..., kv_format: _Optional[str] = ..., instance_id: _Optional[int] = ..., transfer: _Optional[_Union[KvTransfer, str]] = ...) -> None: ...

class ReadKvResponse(_message.Message):
    __slots__ = ("content", "crc32", "memory", "num_blocks")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    crc32: int
    memory: KvMemory
    num_blocks: int
    def __init__(self, content: _Optional[bytes] = ..., crc32: _Optional[int] = ..., memory: _Optional[_Union[KvMemory, _Mapping]] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class KvMemory(_message.Message):
    __slots__ = ("agent", "address")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    agent: bytes
    address: int
    def __init__(self, agent: _Optional[bytes] = ..., address: _Optional[int] = ...) -> None: ...

class PullKvRequest(_message.Message):
    __slots__ = ("epoch", "source_target", "source_host_block_ids", "host_block_ids", "source_instance_id")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_TARGET_FIELD_NUMBER: _ClassVar[int]
    SOURCE_HOST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    source_target: str
    source_host_block_ids: bytes
    host_block_ids: bytes
    source_instance_id: int
    def __init__(self, epoch: _Optional[int] = ..., source_target: _Optional[str] = ..., source_host_block_ids: _Optional[bytes] = ..., host_block_ids: _Optional[bytes] = ..., source_instance_id: _Optional[int] = ...) -> None: ...

class PullKvResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StoreKvRequest(_message.Message):
    __slots__ = ("epoch", "host_block_ids", "labels")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    host_block_ids: bytes
    labels: bytes
    def __init__(self, epoch: _Optional[int] = ..., host_block_ids: _Optional[bytes] = ..., labels: _Optional[bytes] = ...) -> None: ...

class StoreKvResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class FetchKvRequest(_message.Message):
    __slots__ = ("epoch", "host_block_ids", "labels")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    host_block_ids: bytes
    labels: bytes
    def __init__(self, epoch: _Optional[int] = ..., host_block_ids: _Optional[bytes] = ..., labels: _Optional[bytes] = ...) -> None: ...

class FetchKvResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...
