from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class UnloadRequest(_message.Message):
    __slots__ = ("worker", "epoch", "model")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    worker: str
    epoch: int
    model: str
    def __init__(self, worker: _Optional[str] = ..., epoch: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...

class UnloadResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[UnloadedWorker]
    def __init__(self, workers: _Optional[_Iterable[_Union[UnloadedWorker, _Mapping]]] = ...) -> None: ...

class UnloadedWorker(_message.Message):
    __slots__ = ("worker", "was_unloaded")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    WAS_UNLOADED_FIELD_NUMBER: _ClassVar[int]
    worker: str
    was_unloaded: bool
    def __init__(self, worker: _Optional[str] = ..., was_unloaded: bool = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("worker", "directory", "epoch", "model")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    worker: str
    directory: str
    epoch: int
    model: str
    def __init__(self, worker: _Optional[str] = ..., directory: _Optional[str] = ..., epoch: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ("worker", "status", "progress", "is_done", "was_loaded")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    IS_DONE_FIELD_NUMBER: _ClassVar[int]
    WAS_LOADED_FIELD_NUMBER: _ClassVar[int]
    worker: str
    status: str
    progress: float
    is_done: bool
    was_loaded: bool
    def __init__(self, worker: _Optional[str] = ..., status: _Optional[str] = ..., progress: _Optional[float] = ..., is_done: bool = ..., was_loaded: bool = ...) -> None: ...
