from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_DEADLINE: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class PoolingKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_KIND_UNSPECIFIED: _ClassVar[PoolingKind]
    POOLING_KIND_LAST: _ClassVar[PoolingKind]
    POOLING_KIND_MEAN: _ClassVar[PoolingKind]
    POOLING_KIND_CLS: _ClassVar[PoolingKind]
    POOLING_KIND_SCORE: _ClassVar[PoolingKind]

class Task(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_UNSPECIFIED: _ClassVar[Task]
    TASK_GENERATE: _ClassVar[Task]
    TASK_EMBED: _ClassVar[Task]
    TASK_SCORE: _ClassVar[Task]

class EarlyStopping(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EARLY_STOPPING_UNSPECIFIED: _ClassVar[EarlyStopping]
    EARLY_STOPPING_HEURISTIC: _ClassVar[EarlyStopping]
    EARLY_STOPPING_WHEN_FULL: _ClassVar[EarlyStopping]
    EARLY_STOPPING_NEVER: _ClassVar[EarlyStopping]

class MemoryLevel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMORY_LEVEL_UNSPECIFIED: _ClassVar[MemoryLevel]
    MEMORY_LEVEL_OK: _ClassVar[MemoryLevel]
    MEMORY_LEVEL_WARNING: _ClassVar[MemoryLevel]
    MEMORY_LEVEL_CRITICAL: _ClassVar[MemoryLevel]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_DEADLINE: FinishReason
FINISH_REASON_ERROR: FinishReason
POOLING_KIND_UNSPECIFIED: PoolingKind
POOLING_KIND_LAST: PoolingKind
POOLING_KIND_MEAN: PoolingKind
POOLING_KIND_CLS: PoolingKind
POOLING_KIND_SCORE: PoolingKind
TASK_UNSPECIFIED: Task
TASK_GENERATE: Task
TASK_EMBED: Task
TASK_SCORE: Task
EARLY_STOPPING_UNSPECIFIED: EarlyStopping
EARLY_STOPPING_HEURISTIC: EarlyStopping
EARLY_STOPPING_WHEN_FULL: EarlyStopping
EARLY_STOPPING_NEVER: EarlyStopping
MEMORY_LEVEL_UNSPECIFIED: MemoryLevel
MEMORY_LEVEL_OK: MemoryLevel
MEMORY_LEVEL_WARNING: MemoryLevel
MEMORY_LEVEL_CRITICAL: MemoryLevel

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "logit_bias", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "logprobs", "structured", "prompt_logprobs", "adapter", "allowed_token_ids", "pooling")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: _containers.ScalarMap[int, float]
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    structured: StructuredOutput
    prompt_logprobs: int
    adapter: LoraAdapter
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    pooling: Pooling
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., logprobs: _Optional[int] = ..., structured: _Optional[_Union[StructuredOutput, _Mapping]] = ..., prompt_logprobs: _Optional[int] = ..., adapter: _Optional[_Union[LoraAdapter, _Mapping]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., pooling: _Optional[_Union[Pooling, _Mapping]] = ...) -> None: ...

class Pooling(_message.Message):
    __slots__ = ("kind", "normalize", "dimensions", "num_first_tokens")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    kind: PoolingKind
    normalize: bool
    dimensions: int
    num_first_tokens: int
    def __init__(self, kind: _Optional[_Union[PoolingKind, str]] = ..., normalize: bool = ..., dimensions: _Optional[int] = ..., num_first_tokens: _Optional[int] = ...) -> None: ...

class LoraAdapter(_message.Message):
    __slots__ = ("name", "digest", "directory")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: bytes
    directory: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[bytes] = ..., directory: _Optional[str] = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "choice", "grammar")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    choice: Choice
    grammar: str
    def __init__(self, json_schema: _Optional[str] = ..., json_object: bool = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choice, _Mapping]] = ..., grammar: _Optional[str] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class BeamSearch(_message.Message):
    __slots__ = ("width", "length_penalty", "early_stopping")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    width: int
    length_penalty: float
    early_stopping: EarlyStopping
    def __init__(self, width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[_Union[EarlyStopping, str]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("logprob", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class OutputError(_message.Message):
    __slots__ = ("code", "message", "retryable")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    retryable: bool
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., retryable: bool = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("id", "max_model_len", "vocab_size", "eos_token_ids", "structured_output", "adapters", "parent", "directory", "tasks", "embedding_size", "pooling")
    ID_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_SIZE_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    id: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    structured_output: bool
    adapters: _containers.RepeatedCompositeFieldContainer[LoraAdapter]
    parent: str
    directory: str
    tasks: _containers.RepeatedScalarFieldContainer[Task]
    embedding_size: int
    pooling: Pooling
    def __init__(self, id: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., structured_output: bool = ..., adapters: _Optional[_Iterable[_Union[LoraAdapter, _Mapping]]] = ..., parent: _Optional[str] = ..., directory: _Optional[str] = ..., tasks: _Optional[_Iterable[_Union[Task, str]]] = ..., embedding_size: _Optional[int] = ..., pooling: _Optional[_Union[Pooling, _Mapping]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_requests_running", "num_requests_waiting", "max_num_seqs", "num_blocks", "num_free_blocks", "num_cached_blocks", "block_size", "num_workers", "num_requests_swapped", "num_host_blocks", "num_free_host_blocks", "num_cached_host_blocks", "num_swapped_out_blocks", "num_swapped_in_blocks", "num_demoted_blocks", "num_promoted_blocks", "num_pinned_blocks", "num_moved_blocks", "num_prefix_cache_queries", "num_prefix_cache_hits", "fragmentation", "host_fragmentation", "num_slots_held", "num_slots_written", "num_disk_blocks", "num_free_disk_blocks", "num_cached_disk_blocks", "num_stored_blocks", "num_loaded_blocks", "num_failed_disk_moves", "num_spilled_blocks", "num_unloaded_workers")
    NUM_REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_SWAPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_OUT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_IN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_DEMOTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMOTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_MOVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_CACHE_QUERIES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FRAGMENTATION_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_HELD_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_STORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_DISK_MOVES_FIELD_NUMBER: _ClassVar[int]
    NUM_SPILLED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNLOADED_WORKERS_FIELD_NUMBER: _ClassVar[int]
    num_requests_running: int
    num_requests_waiting: int
    max_num_seqs: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    block_size: int
    num_workers: int
    num_requests_swapped: int
    num_host_blocks: int
    num_free_host_blocks: int
    num_cached_host_blocks: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    num_demoted_blocks: int
    num_promoted_blocks: int
    num_pinned_blocks: int
    num_moved_blocks: int
    num_prefix_cache_queries: int
    num_prefix_cache_hits: int
    fragmentation: float
    host_fragmentation: float
    num_slots_held: int
    num_slots_written: int
    num_disk_blocks: int
    num_free_disk_blocks: int
    num_cached_disk_blocks: int
    num_stored_blocks: int
    num_loaded_blocks: int
    num_failed_disk_moves: int
    num_spilled_blocks: int
    num_unloaded_workers: int
    def __init__(self, num_requests_running: _Optional[int] = ..., num_requests_waiting: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., num_workers: _Optional[int] = ..., num_requests_swapped: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., num_free_host_blocks: _Optional[int] = ..., num_cached_host_blocks: _Optional[int] = ..., num_swapped_out_blocks: _Optional[int] = ..., num_swapped_in_blocks: _Optional[int] = ..., num_demoted_blocks: _Optional[int] = ..., num_promoted_blocks: _Optional[int] = ..., num_pinned_blocks: _Optional[int] = ..., num_moved_blocks: _Optional[int] = ..., num_prefix_cache_queries: _Optional[int] = ..., num_prefix_cache_hits: _Optional[int] = ..., fragmentation: _Optional[float] = ..., host_fragmentation: _Optional[float] = ..., num_slots_held: _Optional[int] = ..., num_slots_written: _Optional[int] = ..., num_disk_blocks: _Optional[int] = ..., num_free_disk_blocks: _Optional[int] = ..., num_cached_disk_blocks: _Optional[int] = ..., num_stored_blocks: _Optional[int] = ..., num_loaded_blocks: _Optional[int] = ..., num_failed_disk_moves: _Optional[int] = ..., num_spilled_blocks: _Optional[int] = ..., num_unloaded_workers: _Optional[int] = ...) -> None: ...

class ActivityQuery(_message.Message):
    __slots__ = ("worker", "max_steps", "after_step_id")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    AFTER_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    worker: str
    max_steps: int
    after_step_id: int
    def __init__(self, worker: _Optional[str] = ..., max_steps: _Optional[int] = ..., after_step_id: _Optional[int] = ...) -> None: ...

class WorkerActivity(_message.Message):
    __slots__ = ("worker", "attached_at_s", "load", "num_steps", "num_prefill_tokens", "num_decode_tokens", "num_preemptions", "busy_s", "steps", "memory_level", "is_unloaded")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_AT_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LEVEL_FIELD_NUMBER: _ClassVar[int]
    IS_UNLOADED_FIELD_NUMBER: _ClassVar[int]
    worker: str
    attached_at_s: float
    load: Load
    num_steps: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_preemptions: int
    busy_s: float
    steps: _containers.RepeatedCompositeFieldContainer[StepRecord]
    memory_level: MemoryLevel
    is_unloaded: bool
    def __init__(self, worker: _Optional[str] = ..., attached_at_s: _Optional[float] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., num_steps: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., num_decode_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., busy_s: _Optional[float] = ..., steps: _Optional[_Iterable[_Union[StepRecord, _Mapping]]] = ..., memory_level: _Optional[_Union[MemoryLevel, str]] = ..., is_unloaded: bool = ...) -> None: ...

class StepRecord(_message.Message):
    __slots__ = ("step_id", "answered_at_s", "execute_s", "rpc_s", "num_prefill_tokens", "num_decode_tokens", "num_running", "num_waiting", "num_preemptions", "num_swapped_out_blocks", "num_swapped_in_blocks")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_AT_S_FIELD_NUMBER: _ClassVar[int]
    EXECUTE_S_FIELD_NUMBER: _ClassVar[int]
    RPC_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_OUT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_IN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    answered_at_s: float
    execute_s: float
    rpc_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    def __init__(self, step_id: _Optional[int] = ..., answered_at_s: _Optional[float] = ..., execute_s: _Optional[float] = ..., rpc_s: _Optional[float] = ..., num_prefill_tokens: _Optional[int] = ..., num_decode_tokens: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_swapped_out_blocks: _Optional[int] = ..., num_swapped_in_blocks: _Optional[int] = ...) -> None: ...
