"""Kept files: files of the disk tier that outlive the process, with labels of the records.

A file begins with a page that holds the *identity*, a hash of the model and the KV's layout. Then
come the headers of all blocks: each holds the label of a block's content, the length and checksum
of its record, and the header's own checksum. The records follow.

A header is written when a step's result reports the record as stored. The header is erased before
the record is overwritten, or if the record may be wrong. So even if the process is killed, each
record has the right label or none.

An erasure is synced to the disk only if the record may be wrong, so a loss of power may bring back
older headers and records. Each header has its record's checksum, which shows whether a record
belongs to the header.

A file belongs to the process that has locked it.
"""

import contextlib
import errno
import fcntl
import os
import struct
from pathlib import Path
from typing import Final, NamedTuple

import structlog
from isal import isal_zlib

PAGE_BYTES: Final = 4096
HEADER_BYTES: Final = 64

_MAGIC: Final = b"QuireKV1"
_FIRST: Final = struct.Struct("<8s32sQI")
"""Magic, identity, generation, and a checksum of these three. The generation is a number that each
header repeats; a header with a different number counts as erased. So to erase all headers, the
worker only increments the number on this page."""
_HEADER: Final = struct.Struct("<32sQQQII")
"""Label, generation, age (larger if written later), length of the record in bytes, the record's
checksum, and a checksum of these five."""
_PREFIX: Final = "quire-kv-"
_SUFFIX: Final = ".blocks"
_MAX_FILES: Final = 1024
_PART: Final = 2**16
"""Number of headers to read at a time."""

_log = structlog.get_logger()


class Named(NamedTuple):
    """A record with a label."""

    age: int
    block: int
    label: bytes
    num_bytes: int
    checksum: int


def open_kept(directory: Path, identity: bytes) -> tuple[int, Path]:
    """Open or create a kept file with this identity, and lock the file; may raise OSError.

    Several workers may have the same model and KV layout; each of them locks a file of its own. To
    limit the space on the disk, files with another identity are deleted if no process has locked
    them.
    """
    own = f"{_PREFIX}{identity.hex()[:16]}-"
    for path in directory.glob(f"{_PREFIX}*{_SUFFIX}"):
        if not path.name.startswith(own):
            _delete_unlocked(path)
    for number in range(_MAX_FILES):
        path = directory / f"{own}{number}{_SUFFIX}"
        if (fd := _lock(path, os.O_RDWR | os.O_CREAT)) is not None:
            return fd, path
    raise OSError(errno.EMFILE, f"{_MAX_FILES} files are in use")


def unlocked_bytes(directory: Path) -> int:
    """Return the bytes on the disk of files that `open_kept` would take over or delete."""
    num_bytes = 0
    for path in directory.glob(f"{_PREFIX}*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            if (fd := _lock(path, os.O_RDWR)) is not None:
                num_bytes += os.fstat(fd).st_blocks * 512
                os.close(fd)
    return num_bytes


def _delete_unlocked(path: Path) -> None:
    with contextlib.suppress(OSError):
        if (fd := _lock(path, os.O_RDWR)) is not None:
            path.unlink()
            os.close(fd)
            _log.info("deleted KV of another model or layout", file=str(path))


def _lock(path: Path, flags: int) -> int | None:
    """Open a file and lock it; None if another process has locked or just deleted it."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), path.stat()):
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


class Headers:
    """The first page of a kept file, and the headers of all blocks, which follow this page."""

    def __init__(self, fd: int, identity: bytes, num_blocks: int) -> None:
        """Read the first page; unless it is intact and has this identity, empty the file.

        May raise OSError.
        """
        self._fd = fd
        self._identity = identity
        self._num_blocks = num_blocks
        self._age = 0
        self._generation = self._read_generation()
        if self._generation is None:
            os.ftruncate(fd, 0)
            self._generation = 0
            self.erase_all()

    @property
    def num_bytes(self) -> int:
        """Number of bytes before the first record, a multiple of the page size."""
        return PAGE_BYTES + -(-self._num_blocks * HEADER_BYTES // PAGE_BYTES) * PAGE_BYTES

    def read(self, most_bytes: int) -> list[Named]:
        """Return the records with labels, oldest first; called once, before the other methods.

        Headers of records longer than `most_bytes` are ignored.
        """
        found: list[Named] = []
        for first in range(0, self._num_blocks, _PART):
            size = min(_PART, self._num_blocks - first) * HEADER_BYTES
            data = os.pread(self._fd, size, PAGE_BYTES + first * HEADER_BYTES)
            data = data[: len(data) // HEADER_BYTES * HEADER_BYTES]
            for block, fields in enumerate(_HEADER.iter_unpack(data), first):
                label, generation, age, num_bytes, checksum, own = fields
                start = (block - first) * HEADER_BYTES
                if (
                    generation == self._generation
                    and 0 < num_bytes <= most_bytes
                    and own == isal_zlib.crc32(data[start : start + HEADER_BYTES - 4])
                ):
                    found.append(Named(age, block, label, num_bytes, checksum))
        found.sort()
        self._age = found[-1].age if found else 0
        return found

    def name(self, block: int, label: bytes, num_bytes: int, checksum: int) -> None:
        """Write the header of a record that is already in the file; may raise OSError."""
        self._age += 1
        header = _HEADER.pack(label, self._generation, self._age, num_bytes, checksum, 0)
        os.pwrite(self._fd, _sealed(header), PAGE_BYTES + block * HEADER_BYTES)

    def erase(self, block: int) -> None:
        """Erase a record's header; may raise OSError."""
        os.pwrite(self._fd, bytes(HEADER_BYTES), PAGE_BYTES + block * HEADER_BYTES)

    def erase_all(self) -> None:
        """Erase all headers; may raise OSError."""
        self._generation = (self._generation or 0) + 1
        os.pwrite(self._fd, _sealed(_FIRST.pack(_MAGIC, self._identity, self._generation, 0)), 0)
        self.sync()

    def sync(self) -> None:
        """Write all erasures to the disk, so that they survive a loss of power."""
        os.fdatasync(self._fd)

    def _read_generation(self) -> int | None:
        data = os.pread(self._fd, _FIRST.size, 0)
        if len(data) < _FIRST.size or data != _sealed(data):
            return None
        magic, identity, generation, _ = _FIRST.unpack(data)
        return int(generation) if (magic, identity) == (_MAGIC, self._identity) else None


def _sealed(data: bytes) -> bytes:
    """Return `data` with its last four bytes replaced by a checksum of the other bytes."""
    return data[:-4] + struct.pack("<I", isal_zlib.crc32(data[:-4]))
