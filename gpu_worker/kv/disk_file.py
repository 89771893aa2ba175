"""The file of the disk tier: one record per disk block, each valid as a whole or not at all.

The length and checksum of each record are in memory, where no disk error can change them. Each read
checks both, and so detects a record that is torn, short, stale, misplaced or changed. A file
that is kept for a later process also has the lengths and checksums on the disk (`kept_file.py`).
Any other file has no name, so the file disappears when the process ends.
"""

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
from isal import isal_zlib

from gpu_worker.kv.codecs.records import Bytes, RecordCodec
from gpu_worker.kv.kept_file import PAGE_BYTES, Headers, Named, open_kept


class LostRecordError(Exception):
    """A record could not be written or read back intact."""


class DiskFile:
    """Records of disk blocks [0, num_blocks). Thread-safe, if threads use different blocks."""

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        directory: Path,
        codec: RecordCodec | None,
        identity: bytes | None = None,
    ) -> None:
        """Create the file. It takes space on the disk only for records that have been written.

        With `identity` the file is kept: the next process with this identity opens the file, and
        finds the records that have a label.

        Raises:
            OSError: No file can be created in `directory`.
        """
        self._block_bytes = block_bytes
        self._codec = codec
        self._extent_bytes = self.extent_bytes(block_bytes, codec)
        self._headers: Headers | None = None
        self._first_byte = 0
        if identity is None:
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - see close
        else:
            fd, self._path = open_kept(directory, identity)
            self._file = os.fdopen(fd, "r+b", buffering=0)
            self._headers = Headers(self._file.fileno(), identity, num_blocks)
            self._first_byte = self._headers.num_bytes
        os.ftruncate(self._file.fileno(), self._first_byte + num_blocks * self._extent_bytes)
        # Records are read whole and in random order, so read-ahead would be wasted.
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        self._record_bytes = np.zeros(num_blocks, np.int64)
        """int64[num_blocks]: length of each record; 0: the disk block is empty."""
        self._checksums = np.zeros(num_blocks, np.uint32)
        self.found: dict[int, Named] = {}
        """Records that an earlier process has labelled and this process has not overwritten, oldest
        first."""
        if self._headers is not None:
            self.found = {each.block: each for each in self._headers.read(block_bytes)}
            for named in self.found.values():
                self._record_bytes[named.block] = named.num_bytes
                self._checksums[named.block] = named.checksum

    @staticmethod
    def extent_bytes(block_bytes: int, codec: RecordCodec | None) -> int:
        """Return the bytes reserved per disk block: whole pages, so no two blocks share a page."""
        record_bytes = block_bytes if codec is None else codec.record_bytes
        return -(-record_bytes // PAGE_BYTES) * PAGE_BYTES

    def forget(self, disk_block: int) -> None:
        """Empty a disk block."""
        self._record_bytes[disk_block] = 0
        self.found.pop(disk_block, None)
        if self._headers is not None:
            # If the erasure fails, the old header stays, but the next record does not have its
            # checksum. So no process uses that record under the old label.
            with contextlib.suppress(OSError):
                self._headers.erase(disk_block)

    def name(self, disk_block: int, label: bytes) -> None:
        """Store the label of a written record for the next process; may raise OSError."""
        if self._headers is not None and (num_bytes := int(self._record_bytes[disk_block])):
            self._headers.name(disk_block, label, num_bytes, int(self._checksums[disk_block]))

    def distrust(self, disk_blocks: Sequence[int] | None = None) -> None:
        """Erase the labels of `disk_blocks`, whose records may be wrong; None: erase all labels.

        No later process uses a record without a label.
        """
        if self._headers is None:
            return
        try:
            if disk_blocks is None:
                self._headers.erase_all()
            else:
                for disk_block in disk_blocks:
                    self._headers.erase(disk_block)
                self._headers.sync()
        except OSError:  # labels may remain, so no process may find the file
            self._headers = None
            self._path.unlink(missing_ok=True)

    def write(self, disk_block: int, block: Bytes) -> int:
        """Write uint8[block_bytes] to an empty disk block; return the record's length in bytes.

        Raises:
            LostRecordError: The record could not be written as a whole.
            OSError: The disk cannot be written.

        After an error the disk block is still empty.
        """
        record = (block.data,) if self._codec is None else self._codec.encode(block)
        num_bytes, checksum = 0, 0
        for part in record:
            num_bytes += len(part)
            checksum = isal_zlib.crc32(part, checksum)
        offset = self._first_byte + disk_block * self._extent_bytes
        num_written = os.pwritev(self._file.fileno(), record, offset)
        if num_written != num_bytes:
            raise LostRecordError(f"{num_written} of {num_bytes} bytes were written")
        self._checksums[disk_block] = checksum
        self._record_bytes[disk_block] = num_bytes
        return num_bytes

    def read(self, disk_block: int, out: Bytes) -> int:
        """Read a disk block to `out`, uint8[block_bytes]; return the record's length in bytes.

        Raises:
            LostRecordError: The record is not intact, or the disk block is empty.
            OSError: The disk cannot be read.

        Errors of the codec are passed on. After any error the content of `out` is undefined.
        """
        num_bytes = int(self._record_bytes[disk_block])
        if not num_bytes:
            raise LostRecordError("the disk block is empty")
        codec = self._codec if num_bytes < self._block_bytes else None
        record = out if codec is None else np.empty(num_bytes, np.uint8)
        offset = self._first_byte + disk_block * self._extent_bytes
        num_read = os.preadv(self._file.fileno(), [record.data], offset)
        if num_read != num_bytes:
            raise LostRecordError(f"{num_read} of {num_bytes} bytes were read")
        if isal_zlib.crc32(record) != self._checksums[disk_block]:
            raise LostRecordError("the checksum differs from that of the written record")
        if codec is not None:
            codec.decode(record, out)
        return num_bytes

    def forget_cached_pages(self) -> None:
        """Make the next reads come from the disk, not from the page cache."""
        os.fdatasync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._file.close()
