"""How short a worker's memory is, between protobuf and the core."""

from typing import Final

from quire.v1 import common_pb2
from scheduler_svc.core.pressure import MemoryLevel

_LEVELS: Final = {
    MemoryLevel.OK: common_pb2.MEMORY_LEVEL_OK,
    MemoryLevel.WARNING: common_pb2.MEMORY_LEVEL_WARNING,
    MemoryLevel.CRITICAL: common_pb2.MEMORY_LEVEL_CRITICAL,
}
_FROM_PROTO: Final = {number: level for level, number in _LEVELS.items()}


def memory_level_to_proto(level: MemoryLevel) -> common_pb2.MemoryLevel:
    """Name the level."""
    return _LEVELS[level]


def memory_level_from_proto(number: common_pb2.MemoryLevel) -> MemoryLevel:
    """Take a level; what is not watched, or not known here, is no reason to do less."""
    return _FROM_PROTO.get(number, MemoryLevel.OK)
