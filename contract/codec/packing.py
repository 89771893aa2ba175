"""Packs arrays of integers into `bytes` fields, little-endian on every machine."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from contract.errors import InvalidArgumentError

Int32Array: TypeAlias = npt.NDArray[np.int32]
Uint64Array: TypeAlias = npt.NDArray[np.uint64]

_INT32: np.dtype[np.int32] = np.dtype("<i4")
_UINT64: np.dtype[np.uint64] = np.dtype("<u8")
# Most arrays of most messages are empty, so all empty arrays of one type are one shared object.
_NO_INT32: Int32Array = np.frombuffer(b"", np.int32)
_NO_UINT64: Uint64Array = np.frombuffer(b"", np.uint64)


def pack_int32(values: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """Pack int[N] into 4·N bytes; raises OverflowError if a value is not an int32."""
    return _pack(values, _INT32)


def unpack_int32(packed: bytes, field: str) -> Int32Array:
    """Unpack 4·N bytes into a read-only int32[N] that shares their memory.

    Raises InvalidArgumentError naming `field` if the size is not a multiple of 4.
    """
    if not packed:
        return _NO_INT32
    return _unpack(packed, _INT32, field).astype(np.int32, copy=False)


def pack_uint64(values: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """Pack int[N] into 8·N bytes; raises OverflowError if a value is not a uint64."""
    return _pack(values, _UINT64)


def unpack_uint64(packed: bytes, field: str) -> Uint64Array:
    """Unpack 8·N bytes into a read-only uint64[N] that shares their memory.

    Raises InvalidArgumentError naming `field` if the size is not a multiple of 8.
    """
    if not packed:
        return _NO_UINT64
    return _unpack(packed, _UINT64, field).astype(np.uint64, copy=False)


def _pack(values: Sequence[int] | npt.NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    if not len(values):
        return b""
    if isinstance(values, np.ndarray) and not np.can_cast(values.dtype, dtype):
        # numpy checks a list's values, but silently wraps the values of a wider array.
        limits, least, most = np.iinfo(dtype), int(values.min()), int(values.max())
        if least < limits.min or most > limits.max:
            raise OverflowError(f"values in [{least}, {most}] do not fit {dtype.name}")
    return np.asarray(values, dtype=dtype).tobytes()


def _unpack(packed: bytes, dtype: np.dtype[Any], field: str) -> npt.NDArray[Any]:
    if len(packed) % dtype.itemsize:
        raise InvalidArgumentError(
            field, f"has {len(packed)} bytes; it must be a multiple of {dtype.itemsize}"
        )
    return np.frombuffer(packed, dtype=dtype)
