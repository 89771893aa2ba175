"""Reads the header of a GGUF file: the metadata, and where each tensor is.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package `gguf` reads
headers, too, but takes four seconds for a vocabulary of 49,152 tokens.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from model_files.errors import ModelError

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MAX_ITEMS: Final = 2**24
"""The largest accepted number of metadata entries, tensors, or items of an array. Without a limit,
it could take hours to read a damaged file."""

_NUMBERS: Final = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_ARRAY: Final = 9


@dataclass(frozen=True, slots=True)
class TensorType:
    """The number format of a tensor."""

    name: str
    block_size: int
    """How many numbers of a tensor form a quantization block; 1: the type is not quantized."""
    block_bytes: int

    @property
    def is_quantized(self) -> bool:
        return self.block_size > 1


TENSOR_TYPES: Final = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}
"""The supported types, by the numbers that a file uses for them."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The type, shape and position of a tensor in a file."""

    type: TensorType
    shape: tuple[int, ...]
    """The sizes of the dimensions; the outermost dimension comes first, as in torch."""
    start: int
    """The offset of the tensor's bytes from the beginning of the file."""

    @property
    def row_bytes(self) -> int:
        """The number of bytes along the last dimension."""
        return self.shape[-1] // self.type.block_size * self.type.block_bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A file's metadata, and its tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Read the header, without the tensors' contents.

    Raises:
        ModelError: The file is not GGUF, is damaged or cut off, or has a tensor of an unsupported
            type.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, TypeError, ArithmeticError) as error:
        raise ModelError(f"{path} cannot be read as GGUF: {error}") from error


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self.data, self.at)
        self.at += struct.calcsize(f"<{kind}")
        return value

    def count(self) -> int:
        count: int = self.number("Q")
        if count > _MAX_ITEMS:
            raise ValueError(f"it counts {count} items; at most {_MAX_ITEMS} are supported")
        return count

    def string(self) -> str:
        length = self.number("Q")
        text = self.data[self.at : self.at + length]
        if len(text) != length:
            raise ValueError("it is cut off")
        self.at += length
        return text.decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            of, count = self.number("I"), self.count()
            if of in _NUMBERS:
                numbers = struct.unpack_from(f"<{count}{_NUMBERS[of]}", self.data, self.at)
                self.at += struct.calcsize(f"<{count}{_NUMBERS[of]}")
                return list(numbers)
            return [self.value(of) for _ in range(count)]
        if kind not in _NUMBERS:
            raise ValueError(f"its metadata has a value of type {kind}")
        return self.number(_NUMBERS[kind])


def _parse(path: Path, data: mmap.mmap) -> GgufHeader:
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"it does not begin with {_MAGIC.decode()}")
    cursor = _Cursor(data)
    cursor.at = len(_MAGIC)
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}; supported: 2 and 3")
    num_tensors, num_values = cursor.count(), cursor.count()
    metadata = {cursor.string(): cursor.value(cursor.number("I")) for _ in range(num_values)}
    found = [_tensor(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, type_number, shape, offset in found:
        if type_number not in TENSOR_TYPES:
            known = ", ".join(each.name for each in TENSOR_TYPES.values())
            raise ValueError(f"{name} is of type {type_number}; supported: {known}")
        kind = TENSOR_TYPES[type_number]
        tensor = tensors[name] = GgufTensor(kind, shape, start + offset)
        if shape[-1] % kind.block_size:
            raise ValueError(
                f"{name} has rows of {shape[-1]} numbers; they must be whole blocks of"
                f" {kind.block_size}"
            )
        if tensor.start + tensor.num_bytes > len(data):
            raise ValueError(
                f"{name} ends at byte {tensor.start + tensor.num_bytes}, but the file is cut off at"
                f" {len(data)}"
            )
    return GgufHeader(path, metadata, tensors)


def _tensor(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    name, num_dims = cursor.string(), cursor.number("I")
    shape = tuple(cursor.number("Q") for _ in range(num_dims))[::-1]
    return name, cursor.number("I"), shape or (1,), cursor.number("Q")
