"""Frames of a recording: length, checksum, payload; what they hold is not this file's affair."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final
from zlib import crc32

MAGIC: Final = b"QUIREREC"
"""What a recording begins with."""
_HEAD: Final = struct.Struct("<II")
_MAX_PIECE_BYTES: Final = 2**20


class RecordingError(Exception):
    """A file that is no recording, or cannot be read as one. The message says where and why."""


@dataclass(frozen=True, slots=True)
class CutOff:
    """The file ends within a frame: its process was killed while it wrote."""

    num_bytes: int
    """What there is of the frame."""


def to_frame(payload: bytes) -> bytes:
    """Put length and checksum before a payload."""
    return _HEAD.pack(len(payload), crc32(payload)) + payload


def read_frames(file: BinaryIO) -> Iterator[bytes | CutOff]:
    """Yield the payloads of a recording; after them, perhaps, that another one is cut off.

    Raises:
        RecordingError: It is no recording, or a frame is damaged.
    """
    if file.read(len(MAGIC)) != MAGIC:
        raise RecordingError(f"it is no recording: it does not begin with {MAGIC.decode()}")
    number, offset = 0, len(MAGIC)
    while head := file.read(_HEAD.size):
        if len(head) < _HEAD.size:
            yield CutOff(len(head))
            return
        length, expected = _HEAD.unpack(head)
        payload = _read(file, length)
        if len(payload) < length:
            yield CutOff(len(head) + len(payload))
            return
        if crc32(payload) != expected:
            raise RecordingError(
                f"frame {number}, at byte {offset}, is damaged: its checksum is "
                f"{crc32(payload):08x} and should be {expected:08x}"
            )
        yield payload
        number, offset = number + 1, offset + len(head) + length


def _read(file: BinaryIO, length: int) -> bytes:
    """Read up to `length` bytes; memory is taken for what there is, not for what is announced."""
    pieces: list[bytes] = []
    while length and (piece := file.read(min(length, _MAX_PIECE_BYTES))):
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)
