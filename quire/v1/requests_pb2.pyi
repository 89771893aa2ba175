from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_PREPARING: _ClassVar[RequestState]
    REQUEST_STATE_WAITING: _ClassVar[RequestState]
    REQUEST_STATE_RUNNING: _ClassVar[RequestState]
    REQUEST_STATE_UNREAD: _ClassVar[RequestState]
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_PREPARING: RequestState
REQUEST_STATE_WAITING: RequestState
REQUEST_STATE_RUNNING: RequestState
REQUEST_STATE_UNREAD: RequestState

class RequestFilter(_message.Message):
    __slots__ = ("request_id", "tenant", "min_age_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MIN_AGE_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    min_age_s: float
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., min_age_s: _Optional[float] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("filter",)
    FILTER_FIELD_NUMBER: _ClassVar[int]
    filter: RequestFilter
    def __init__(self, filter: _Optional[_Union[RequestFilter, _Mapping]] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[LiveRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[LiveRequest, _Mapping]]] = ...) -> None: ...

class CancelRequestsRequest(_message.Message):
    __slots__ = ("filter",)
    FILTER_FIELD_NUMBER: _ClassVar[int]
    filter: RequestFilter
    def __init__(self, filter: _Optional[_Union[RequestFilter, _Mapping]] = ...) -> None: ...

class CancelRequestsResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[LiveRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[LiveRequest, _Mapping]]] = ...) -> None: ...

class LiveRequest(_message.Message):
    __slots__ = ("request_id", "tenant", "age_s", "state", "model", "num_prompt_tokens", "num_output_tokens", "num_outputs", "priority", "is_resumable")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    IS_RESUMABLE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    age_s: float
    state: RequestState
    model: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_outputs: int
    priority: int
    is_resumable: bool
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., age_s: _Optional[float] = ..., state: _Optional[_Union[RequestState, str]] = ..., model: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_outputs: _Optional[int] = ..., priority: _Optional[int] = ..., is_resumable: bool = ...) -> None: ...

class ReadUsageRequest(_message.Message):
    __slots__ = ("since", "until", "by")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    since: float
    until: float
    by: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, since: _Optional[float] = ..., until: _Optional[float] = ..., by: _Optional[_Iterable[str]] = ...) -> None: ...

class ReadUsageResponse(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[UsageRow]
    def __init__(self, rows: _Optional[_Iterable[_Union[UsageRow, _Mapping]]] = ...) -> None: ...

class UsageRow(_message.Message):
    __slots__ = ("hour", "day", "tenant", "key", "model", "adapter", "requests", "prompt_tokens", "cached_tokens", "generated_tokens", "reasoning_tokens")
    HOUR_FIELD_NUMBER: _ClassVar[int]
    DAY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    hour: int
    day: int
    tenant: str
    key: str
    model: str
    adapter: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    reasoning_tokens: int
    def __init__(self, hour: _Optional[int] = ..., day: _Optional[int] = ..., tenant: _Optional[str] = ..., key: _Optional[str] = ..., model: _Optional[str] = ..., adapter: _Optional[str] = ..., requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ...) -> None: ...
