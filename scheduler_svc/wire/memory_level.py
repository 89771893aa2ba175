"""How short a worker's memory is, between protobuf and the core."""

from typing import Final

from quire.v1 import worker_pb2
from scheduler_svc.core.pressure import MemoryLevel

_LEVELS: Final = {
    MemoryLevel.OK: worker_pb2.MEMORY_LEVEL_OK,
    MemoryLevel.WARNING: worker_pb2.MEMORY_LEVEL_WARNING,
    MemoryLevel.CRITICAL: worker_pb2.MEMORY_LEVEL_CRITICAL,
}
_FROM_PROTO: Final = {number: level for level, number in _LEVELS.items()}


def memory_level_to_proto(level: MemoryLevel) -> worker_pb2.MemoryLevel:
    """Name the level."""
    return _LEVELS[level]


def memory_level_from_proto(number: worker_pb2.MemoryLevel) -> MemoryLevel:
    """Take a level; what is not watched, or not known here, is no reason to do less."""
    return _FROM_PROTO.get(number, MemoryLevel.OK)
