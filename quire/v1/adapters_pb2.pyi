from quire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "directory", "epoch", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    directory: str
    epoch: int
    model: str
    def __init__(self, name: _Optional[str] = ..., directory: _Optional[str] = ..., epoch: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter", "was_there")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    WAS_THERE_FIELD_NUMBER: _ClassVar[int]
    adapter: _common_pb2.LoraAdapter
    was_there: bool
    def __init__(self, adapter: _Optional[_Union[_common_pb2.LoraAdapter, _Mapping]] = ..., was_there: bool = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name", "epoch", "digest", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    epoch: int
    digest: bytes
    model: str
    def __init__(self, name: _Optional[str] = ..., epoch: _Optional[int] = ..., digest: _Optional[bytes] = ..., model: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[LoadedAdapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[LoadedAdapter, _Mapping]]] = ...) -> None: ...

class LoadedAdapter(_message.Message):
    __slots__ = ("adapter", "is_leaving")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    IS_LEAVING_FIELD_NUMBER: _ClassVar[int]
    adapter: _common_pb2.LoraAdapter
    is_leaving: bool
    def __init__(self, adapter: _Optional[_Union[_common_pb2.LoraAdapter, _Mapping]] = ..., is_leaving: bool = ...) -> None: ...
