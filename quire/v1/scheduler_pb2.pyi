from quire.v1 import common_pb2 as _common_pb2
from quire.v1 import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ConnectRequest(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "resume", "leave", "unpin", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    submit: Submit
    cancel: Cancel
    resume: Resume
    leave: Leave
    unpin: Unpin
    heartbeat: RouterHeartbeat
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., unpin: _Optional[_Union[Unpin, _Mapping]] = ..., heartbeat: _Optional[_Union[RouterHeartbeat, _Mapping]] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("welcome", "step", "refused", "resumed")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    welcome: SchedulerWelcome
    step: StepOutput
    refused: Refused
    resumed: Resumed
    def __init__(self, welcome: _Optional[_Union[SchedulerWelcome, _Mapping]] = ..., step: _Optional[_Union[StepOutput, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., resumed: _Optional[_Union[Resumed, _Mapping]] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("router_id",)
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    def __init__(self, router_id: _Optional[str] = ...) -> None: ...

class SchedulerWelcome(_message.Message):
    __slots__ = ("epoch", "model", "resume_grace_s", "superseded_epochs", "max_waiting", "wants_heartbeats")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RESUME_GRACE_S_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_FIELD_NUMBER: _ClassVar[int]
    WANTS_HEARTBEATS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    model: _common_pb2.ModelInfo
    resume_grace_s: float
    superseded_epochs: _containers.RepeatedScalarFieldContainer[int]
    max_waiting: int
    wants_heartbeats: bool
    def __init__(self, epoch: _Optional[int] = ..., model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., resume_grace_s: _Optional[float] = ..., superseded_epochs: _Optional[_Iterable[int]] = ..., max_waiting: _Optional[int] = ..., wants_heartbeats: bool = ...) -> None: ...

class RouterHeartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "first_seq_key", "n", "prompt_token_ids", "sampling", "cache_salt", "traceparent", "outputs", "priority", "tenant", "deadline_s", "cache_pin_s", "beam", "resume_record", "is_again")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQ_KEY_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_PIN_S_FIELD_NUMBER: _ClassVar[int]
    BEAM_FIELD_NUMBER: _ClassVar[int]
    RESUME_RECORD_FIELD_NUMBER: _ClassVar[int]
    IS_AGAIN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    first_seq_key: int
    n: int
    prompt_token_ids: bytes
    sampling: _common_pb2.SamplingParams
    cache_salt: str
    traceparent: str
    outputs: _containers.RepeatedCompositeFieldContainer[OutputSoFar]
    priority: int
    tenant: str
    deadline_s: float
    cache_pin_s: float
    beam: _common_pb2.BeamSearch
    resume_record: bytes
    is_again: bool
    def __init__(self, request_id: _Optional[str] = ..., first_seq_key: _Optional[int] = ..., n: _Optional[int] = ..., prompt_token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., cache_salt: _Optional[str] = ..., traceparent: _Optional[str] = ..., outputs: _Optional[_Iterable[_Union[OutputSoFar, _Mapping]]] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., deadline_s: _Optional[float] = ..., cache_pin_s: _Optional[float] = ..., beam: _Optional[_Union[_common_pb2.BeamSearch, _Mapping]] = ..., resume_record: _Optional[bytes] = ..., is_again: bool = ...) -> None: ...

class OutputSoFar(_message.Message):
    __slots__ = ("token_ids", "finished", "end")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    finished: bool
    end: SequenceFinished
    def __init__(self, token_ids: _Optional[bytes] = ..., finished: bool = ..., end: _Optional[_Union[SequenceFinished, _Mapping]] = ...) -> None: ...

class StopOptions(_message.Message):
    __slots__ = ("stop", "include_stop_str_in_output", "skip_special_tokens", "thinking", "stream_interval")
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    STREAM_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    thinking: ThinkingMarkers
    stream_interval: int
    def __init__(self, stop: _Optional[_Iterable[str]] = ..., include_stop_str_in_output: bool = ..., skip_special_tokens: bool = ..., thinking: _Optional[_Union[ThinkingMarkers, _Mapping]] = ..., stream_interval: _Optional[int] = ...) -> None: ...

class ThinkingMarkers(_message.Message):
    __slots__ = ("begin", "ends", "has_begun", "recurs")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    HAS_BEGUN_FIELD_NUMBER: _ClassVar[int]
    RECURS_FIELD_NUMBER: _ClassVar[int]
    begin: str
    ends: _containers.RepeatedScalarFieldContainer[str]
    has_begun: bool
    recurs: bool
    def __init__(self, begin: _Optional[str] = ..., ends: _Optional[_Iterable[str]] = ..., has_begun: bool = ..., recurs: bool = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("request_id", "tenant", "first_seq_key")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQ_KEY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    first_seq_key: int
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., first_seq_key: _Optional[int] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("seq_keys",)
    SEQ_KEYS_FIELD_NUMBER: _ClassVar[int]
    seq_keys: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, seq_keys: _Optional[_Iterable[int]] = ...) -> None: ...

class Unpin(_message.Message):
    __slots__ = ("request_id", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class Resumed(_message.Message):
    __slots__ = ("submit", "so_far")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    SO_FAR_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    so_far: StepOutput
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., so_far: _Optional[_Union[StepOutput, _Mapping]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("seq_keys",)
    SEQ_KEYS_FIELD_NUMBER: _ClassVar[int]
    seq_keys: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, seq_keys: _Optional[_Iterable[int]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("first_seq_key", "code", "message", "retry_after_s")
    FIRST_SEQ_KEY_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    first_seq_key: int
    code: int
    message: str
    retry_after_s: float
    def __init__(self, first_seq_key: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("step_id", "seq_keys", "token_ids", "logprobs", "admitted", "finished", "prompt_logprobs", "pinned", "room", "max_model_len", "adapters", "is_unloaded", "pooled")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_KEYS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    IS_UNLOADED_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    seq_keys: bytes
    token_ids: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[IndexedLogprob]
    admitted: _containers.RepeatedCompositeFieldContainer[SequenceAdmitted]
    finished: _containers.RepeatedCompositeFieldContainer[SequenceFinished]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[SequencePromptLogprobs]
    pinned: _containers.RepeatedCompositeFieldContainer[SequencePinned]
    room: QueueRoom
    max_model_len: int
    adapters: ServedAdapters
    is_unloaded: bool
    pooled: _containers.RepeatedCompositeFieldContainer[SequencePooled]
    def __init__(self, step_id: _Optional[int] = ..., seq_keys: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[IndexedLogprob, _Mapping]]] = ..., admitted: _Optional[_Iterable[_Union[SequenceAdmitted, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[SequenceFinished, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[SequencePromptLogprobs, _Mapping]]] = ..., pinned: _Optional[_Iterable[_Union[SequencePinned, _Mapping]]] = ..., room: _Optional[_Union[QueueRoom, _Mapping]] = ..., max_model_len: _Optional[int] = ..., adapters: _Optional[_Union[ServedAdapters, _Mapping]] = ..., is_unloaded: bool = ..., pooled: _Optional[_Iterable[_Union[SequencePooled, _Mapping]]] = ...) -> None: ...

class ServedAdapters(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[_common_pb2.LoraAdapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[_common_pb2.LoraAdapter, _Mapping]]] = ...) -> None: ...

class QueueRoom(_message.Message):
    __slots__ = ("num_sequences",)
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    num_sequences: int
    def __init__(self, num_sequences: _Optional[int] = ...) -> None: ...

class SequencePromptLogprobs(_message.Message):
    __slots__ = ("seq_key", "position", "logprobs")
    SEQ_KEY_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    seq_key: int
    position: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    def __init__(self, seq_key: _Optional[int] = ..., position: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class SequencePooled(_message.Message):
    __slots__ = ("seq_key", "vector")
    SEQ_KEY_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    seq_key: int
    vector: bytes
    def __init__(self, seq_key: _Optional[int] = ..., vector: _Optional[bytes] = ...) -> None: ...

class IndexedLogprob(_message.Message):
    __slots__ = ("index", "logprob")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    index: int
    logprob: _common_pb2.TokenLogprob
    def __init__(self, index: _Optional[int] = ..., logprob: _Optional[_Union[_common_pb2.TokenLogprob, _Mapping]] = ...) -> None: ...

class SequenceAdmitted(_message.Message):
    __slots__ = ("seq_key", "num_cached_tokens", "queue_s")
    SEQ_KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    seq_key: int
    num_cached_tokens: int
    queue_s: float
    def __init__(self, seq_key: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ...) -> None: ...

class SequencePinned(_message.Message):
    __slots__ = ("seq_key", "num_pinned_tokens")
    SEQ_KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_PINNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    seq_key: int
    num_pinned_tokens: int
    def __init__(self, seq_key: _Optional[int] = ..., num_pinned_tokens: _Optional[int] = ...) -> None: ...

class SequenceFinished(_message.Message):
    __slots__ = ("seq_key", "finish_reason", "stop_token_id", "error", "cumulative_logprob")
    SEQ_KEY_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    seq_key: int
    finish_reason: _common_pb2.FinishReason
    stop_token_id: int
    error: _common_pb2.OutputError
    cumulative_logprob: float
    def __init__(self, seq_key: _Optional[int] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.OutputError, _Mapping]] = ..., cumulative_logprob: _Optional[float] = ...) -> None: ...

class GetSchedulerLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSchedulerLoadResponse(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: _common_pb2.Load
    def __init__(self, load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ...) -> None: ...

class DefragmentRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DefragmentResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerDefragmentation]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerDefragmentation, _Mapping]]] = ...) -> None: ...

class WorkerDefragmentation(_message.Message):
    __slots__ = ("worker", "rate_before", "rate_after", "num_moved_blocks")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    RATE_BEFORE_FIELD_NUMBER: _ClassVar[int]
    RATE_AFTER_FIELD_NUMBER: _ClassVar[int]
    NUM_MOVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    rate_before: float
    rate_after: float
    num_moved_blocks: int
    def __init__(self, worker: _Optional[str] = ..., rate_before: _Optional[float] = ..., rate_after: _Optional[float] = ..., num_moved_blocks: _Optional[int] = ...) -> None: ...

class DescribeSchedulerKvRequest(_message.Message):
    __slots__ = ("query",)
    QUERY_FIELD_NUMBER: _ClassVar[int]
    query: _kv_pb2.KvQuery
    def __init__(self, query: _Optional[_Union[_kv_pb2.KvQuery, _Mapping]] = ...) -> None: ...

class DescribeSchedulerKvResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[_kv_pb2.WorkerKv]
    def __init__(self, workers: _Optional[_Iterable[_Union[_kv_pb2.WorkerKv, _Mapping]]] = ...) -> None: ...

class DescribeSchedulerActivityRequest(_message.Message):
    __slots__ = ("query",)
    QUERY_FIELD_NUMBER: _ClassVar[int]
    query: _common_pb2.ActivityQuery
    def __init__(self, query: _Optional[_Union[_common_pb2.ActivityQuery, _Mapping]] = ...) -> None: ...

class DescribeSchedulerActivityResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[_common_pb2.WorkerActivity]
    def __init__(self, workers: _Optional[_Iterable[_Union[_common_pb2.WorkerActivity, _Mapping]]] = ...) -> None: ...

class MigrateRequest(_message.Message):
    __slots__ = ("request_id", "worker")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    worker: str
    def __init__(self, request_id: _Optional[str] = ..., worker: _Optional[str] = ...) -> None: ...

class MigrateResponse(_message.Message):
    __slots__ = ("from_worker", "num_sequences", "num_blocks", "was_there")
    FROM_WORKER_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAS_THERE_FIELD_NUMBER: _ClassVar[int]
    from_worker: str
    num_sequences: int
    num_blocks: int
    was_there: bool
    def __init__(self, from_worker: _Optional[str] = ..., num_sequences: _Optional[int] = ..., num_blocks: _Optional[int] = ..., was_there: bool = ...) -> None: ...

class ResizeKvRequest(_message.Message):
    __slots__ = ("worker", "num_blocks", "num_bytes")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    worker: str
    num_blocks: int
    num_bytes: int
    def __init__(self, worker: _Optional[str] = ..., num_blocks: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class ResizeKvResponse(_message.Message):
    __slots__ = ("num_blocks_before", "num_blocks", "num_leaving_blocks", "is_done", "block_bytes")
    NUM_BLOCKS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEAVING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IS_DONE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_blocks_before: int
    num_blocks: int
    num_leaving_blocks: int
    is_done: bool
    block_bytes: int
    def __init__(self, num_blocks_before: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_leaving_blocks: _Optional[int] = ..., is_done: bool = ..., block_bytes: _Optional[int] = ...) -> None: ...
