"""What the disk pool asks of a codec, and the codecs as it uses them."""

import time
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker import metrics
from gpu_worker.kv.codecs.names import CodecSpec
from gpu_worker.kv.codecs.quantized import QuantizedCodec

Bytes: TypeAlias = npt.NDArray[np.uint8]
Record: TypeAlias = tuple[memoryview, ...]
"""What is written one after another, as bytes."""


class RecordCodec(Protocol):
    """Turns a block into what is written to the disk, and back; any thread may call it."""

    @property
    def record_bytes(self) -> int:
        """The most bytes of a record."""

    def encode(self, block: Bytes) -> Record:
        """Give the record of a block; one as long as the block is the block itself."""

    def decode(self, record: Bytes, out: Bytes) -> None:
        """Write the block to `out` of a record that is shorter than a block."""


class QuantizedRecords:
    """A quantized codec on the CPU, one part of a block after another.

    In small parts, torch does not divide the work among threads: the step's threads need the cores.
    """

    def __init__(self, codec: QuantizedCodec, num_parts: int) -> None:
        """`codec` is one for blocks of a `num_parts`-th of the size."""
        self._codec = codec
        self._num_parts = num_parts
        self.record_bytes = num_parts * codec.record_bytes

    def encode(self, block: Bytes) -> Record:
        """Give uint8[record_bytes] of uint8[block_bytes]."""
        parts = torch.from_numpy(block).view(self._num_parts, 1, -1)
        return tuple(self._codec.encode(part).numpy()[0].data for part in parts)

    def decode(self, record: Bytes, out: Bytes) -> None:
        """Write uint8[block_bytes]."""
        parts = torch.from_numpy(record).view(self._num_parts, 1, -1)
        decoded = torch.from_numpy(out).view(self._num_parts, 1, -1)
        for part, target in zip(parts, decoded, strict=True):
            target.copy_(self._codec.decode(part))


class MeteredRecords:
    """Another codec, whose ratio and cost are counted."""

    def __init__(self, codec: RecordCodec, spec: CodecSpec) -> None:
        self._codec = codec
        self._name = str(spec)
        self.record_bytes = codec.record_bytes

    def encode(self, block: Bytes) -> Record:
        """As the other does."""
        start_s = time.perf_counter()
        record = self._codec.encode(block)
        seconds = time.perf_counter() - start_s
        metrics.count_coded(
            "disk", self._name, "encode", len(block), sum(map(len, record)), seconds
        )
        return record

    def decode(self, record: Bytes, out: Bytes) -> None:
        """As the other does."""
        start_s = time.perf_counter()
        self._codec.decode(record, out)
        seconds = time.perf_counter() - start_s
        metrics.count_coded("disk", self._name, "decode", len(out), len(record), seconds)
