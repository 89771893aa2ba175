"""The file that holds the disk tier: a record for each disk block, good as a whole or not at all.

The file is the process's own: it has no name, nothing of it survives the process, so nothing is
ever synced to the disk. For the same reason what tells a good record from a bad one, its length and
checksum, is kept in memory, where no disk can lose it or keep an older one: a record that is torn,
short, stale, misplaced or changed is an error.
"""

import os
import tempfile
from pathlib import Path

import numpy as np
from isal import isal_zlib

from gpu_worker.kv.codecs.records import Bytes, RecordCodec

_PAGE_BYTES = 4096


class LostRecordError(Exception):
    """What is in the file, or went to it, is not what should be."""


class DiskFile:
    """Records of disk blocks [0, num_blocks). Threads may share it, but not one block of it."""

    def __init__(
        self, num_blocks: int, block_bytes: int, directory: Path, codec: RecordCodec | None
    ) -> None:
        """Make the file; it takes room as it is written.

        Raises:
            OSError: no file can be made in `directory`.
        """
        self._block_bytes = block_bytes
        self._codec = codec
        self._extent_bytes = self.extent_bytes(block_bytes, codec)
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - see close
        os.ftruncate(self._file.fileno(), num_blocks * self._extent_bytes)
        # A record is read as a whole, and never the one behind it for being behind it.
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        self._record_bytes = np.zeros(num_blocks, np.int64)
        """Of each disk block's record; 0: it holds nothing."""
        self._checksums = np.zeros(num_blocks, np.uint32)

    @staticmethod
    def extent_bytes(block_bytes: int, codec: RecordCodec | None) -> int:
        """The room of one disk block: whole pages, so that no write touches a neighbour's."""
        record_bytes = block_bytes if codec is None else codec.record_bytes
        return -(-record_bytes // _PAGE_BYTES) * _PAGE_BYTES

    def forget(self, disk_block: int) -> None:
        """Let a disk block hold nothing."""
        self._record_bytes[disk_block] = 0

    def write(self, disk_block: int, block: Bytes) -> int:
        """Write uint8[block_bytes] to a disk block that holds nothing; returns the record's bytes.

        Raises:
            LostRecordError, OSError: it still holds nothing.
        """
        record = (block.data,) if self._codec is None else self._codec.encode(block)
        num_bytes, checksum = 0, 0
        for part in record:
            num_bytes += len(part)
            checksum = isal_zlib.crc32(part, checksum)
        offset = disk_block * self._extent_bytes
        num_written = os.pwritev(self._file.fileno(), record, offset)
        if num_written != num_bytes:
            raise LostRecordError(f"{num_written} of {num_bytes} bytes were written")
        self._checksums[disk_block] = checksum
        self._record_bytes[disk_block] = num_bytes
        return num_bytes

    def read(self, disk_block: int, out: Bytes) -> int:
        """Read a disk block to uint8[block_bytes]; returns the record's bytes.

        Raises:
            LostRecordError, OSError, or what the codec may: `out` has any content.
        """
        num_bytes = int(self._record_bytes[disk_block])
        if not num_bytes:
            raise LostRecordError("nothing was written")
        codec = self._codec if num_bytes < self._block_bytes else None
        record = out if codec is None else np.empty(num_bytes, np.uint8)
        offset = disk_block * self._extent_bytes
        num_read = os.preadv(self._file.fileno(), [record.data], offset)
        if num_read != num_bytes:
            raise LostRecordError(f"{num_read} of {num_bytes} bytes were read")
        if isal_zlib.crc32(record) != self._checksums[disk_block]:
            raise LostRecordError("what was read is not what was written")
        if codec is not None:
            codec.decode(record, out)
        return num_bytes

    def forget_cached_pages(self) -> None:
        """Have the next reads come from the disk and not from the system's memory."""
        os.fdatasync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Give up the file and its room."""
        self._file.close()
