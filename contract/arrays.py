"""The array types of the contract. Arrays have one dimension, unless a docstring gives a shape."""

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
Uint64Array: TypeAlias = npt.NDArray[np.uint64]
Float32Array: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
Labels: TypeAlias = npt.NDArray[np.uint8]
"""uint8[N, 32]: the hashes of N blocks."""

_NO_INTS: Final[Int32Array] = np.empty(0, np.int32)
_NO_FLOATS: Final[Float32Array] = np.empty(0, np.float32)
_NO_LABELS: Final[Labels] = np.empty((0, 32), np.uint8)
# Most arrays of a step are empty, so all empty arrays of one type are one shared object.


def ints(values: Sequence[int]) -> Int32Array:
    """Return the values as int32[N], or the shared empty array if there are no values."""
    return np.array(values, np.int32) if values else _NO_INTS


def no_ints() -> Int32Array:
    """Return the shared int32[0]."""
    return _NO_INTS


def no_floats() -> Float32Array:
    """Return the shared float32[0]."""
    return _NO_FLOATS


def no_labels() -> Labels:
    """Return the shared uint8[0, 32]."""
    return _NO_LABELS
