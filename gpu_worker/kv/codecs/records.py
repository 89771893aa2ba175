"""The interface of the disk pool's codecs, with wrappers for quantized codecs and for metrics."""

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
"""An encoded block, as buffers that are written to the disk one after another."""


class RecordCodec(Protocol):
    """Encodes blocks as records for the disk, and decodes records. Thread-safe."""

    @property
    def record_bytes(self) -> int:
        """The largest size of a record."""

    def encode(self, block: Bytes) -> Record:
        """Return the encoded block, or the block itself if encoding does not make it smaller."""

    def decode(self, record: Bytes, out: Bytes) -> None:
        """Decode `record`, which is smaller than a block, to `out`."""


class QuantizedRecords:
    """A quantized codec on the CPU, applied to a block part by part.

    Each part is so small that torch uses only one thread. So the other cores stay free for the step
    that runs at the same time.
    """

    def __init__(self, codec: QuantizedCodec, num_parts: int) -> None:
        """A block has `num_parts` equal parts; `codec` must be set up for the size of one part."""
        self._codec = codec
        self._num_parts = num_parts
        self.record_bytes = num_parts * codec.record_bytes

    def encode(self, block: Bytes) -> Record:
        parts = torch.from_numpy(block).view(self._num_parts, 1, -1)
        return tuple(self._codec.encode(part).numpy()[0].data for part in parts)

    def decode(self, record: Bytes, out: Bytes) -> None:
        parts = torch.from_numpy(record).view(self._num_parts, 1, -1)
        decoded = torch.from_numpy(out).view(self._num_parts, 1, -1)
        for part, target in zip(parts, decoded, strict=True):
            target.copy_(self._codec.decode(part))


class MeteredRecords:
    """Passes calls to a codec, and counts the bytes and seconds of each call in metrics."""

    def __init__(self, codec: RecordCodec, spec: CodecSpec) -> None:
        self._codec = codec
        self._name = str(spec)
        self.record_bytes = codec.record_bytes

    def encode(self, block: Bytes) -> Record:
        start_s = time.perf_counter()
        record = self._codec.encode(block)
        seconds = time.perf_counter() - start_s
        metrics.count_coded(
            "disk", self._name, "encode", len(block), sum(map(len, record)), seconds
        )
        return record

    def decode(self, record: Bytes, out: Bytes) -> None:
        start_s = time.perf_counter()
        self._codec.decode(record, out)
        seconds = time.perf_counter() - start_s
        metrics.count_coded("disk", self._name, "decode", len(out), len(record), seconds)
