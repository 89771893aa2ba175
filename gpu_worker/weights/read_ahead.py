"""Reads tensors' bytes into the page cache, in parallel, before the tensors are loaded.

The files are mapped into memory. Without this module, a file would be read piece by piece, because
each access waits until the pages around it have been read. Disks, above all those behind a network,
are faster with several large reads at once. The process does not keep the bytes that it reads: they
stay in the page cache, from which the system can drop them. vLLM's loading strategy "prefetch" also
reads files into the page cache.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Final, Self

from gpu_worker.memory.available import available_bytes
from gpu_worker.weights.json_fields import ModelError
from gpu_worker.weights.tensor_file import Extent

NUM_THREADS: Final = 8
REQUEST_BYTES: Final = 4 * 2**20
AHEAD_BYTES: Final = 512 * 2**20
_PROBE_BYTES: Final = 2**20
"""If two pages at this distance from each other are cached, the pages between the two are assumed
to be cached, too."""


def read_to_cache(extent: Extent) -> None:
    """Read an extent into the page cache, unless all of the extent is cached already.

    Raises:
        OSError: The bytes cannot be read, or the file has become shorter.
    """
    file, start, stop = extent.descriptor, extent.bytes.start, extent.bytes.stop
    probes = (*extent.bytes[::_PROBE_BYTES], *extent.bytes[-1:])
    if all(_is_cached(file, position) for position in probes):
        return
    buffer = memoryview(bytearray(stop - start))
    while start < stop:
        num_bytes = os.preadv(file, [buffer[: stop - start]], start)
        if num_bytes == 0:
            raise OSError(f"it ends at byte {start}; it had at least {stop}")
        start += num_bytes


class ReadAhead:
    """Reads extents of files into the page cache, in the order in which they are needed.

    Reading ahead stops at `AHEAD_BYTES` after the extent in use, or at a quarter of the free memory
    if this quarter is less. An extent larger than half of the free memory is left out, because the
    system might drop its beginning from the page cache before its end is read.
    """

    def __init__(
        self,
        extents: Iterable[Extent | None],
        read: Callable[[Extent], None] = read_to_cache,
        available: Callable[[], int] = available_bytes,
    ) -> None:
        """Read nothing yet.

        Args:
            extents: In the order in which they are needed; their files must stay open. None is an
                unknown extent, which is left out.
            read: Reads an extent of at most `REQUEST_BYTES`; called on several threads.
            available: Returns the bytes of free memory.
        """
        self._waiting = deque(extents)
        self._started: deque[list[tuple[Extent, Future[None]]]] = deque()
        self._ahead_bytes = 0
        self._read = read
        self._available = available
        self._available_bytes = available()
        self._pool = ThreadPoolExecutor(NUM_THREADS, "read-ahead")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel reads that have not begun, and end the threads."""
        self._pool.shutdown(cancel_futures=True)

    def wait_for_next(self) -> None:
        """Wait until the next extent has been read, and begin to read extents after it.

        Raises:
            ModelError: Bytes of the extent could not be read, even at the second attempt. Without
                the error, a mapped access to these bytes would end the process.
        """
        if not self._started and self._waiting:
            self._start(self._waiting.popleft())
        if not self._started:
            return
        requests = self._started.popleft()
        self._ahead_bytes -= sum(len(request.bytes) for request, _ in requests)
        if self._ahead_bytes < AHEAD_BYTES // 2:
            self._available_bytes = self._available()
            most = min(AHEAD_BYTES, self._available_bytes // 4)
            while self._waiting and self._ahead_bytes < most:
                self._start(self._waiting.popleft())
        for request, future in requests:
            if isinstance(future.exception(), OSError):
                self._read_again(request)

    def _start(self, extent: Extent | None) -> None:
        if extent is None or len(extent.bytes) > self._available_bytes // 2:
            self._started.append([])
            return
        cuts = [*extent.bytes[::REQUEST_BYTES], extent.bytes.stop]
        requests = [replace(extent, bytes=range(*cut)) for cut in pairwise(cuts)]
        try:
            futures = [self._pool.submit(self._read, request) for request in requests]
        except RuntimeError:  # no thread can be started, so later extents are only mapped
            self._waiting.clear()
            return
        self._started.append(list(zip(requests, futures, strict=True)))
        self._ahead_bytes += len(extent.bytes)

    def _read_again(self, request: Extent) -> None:
        try:
            self._read(request)
        except OSError as error:
            raise ModelError(f"{request.path} cannot be read any more: {error}") from error


def _is_cached(file: int, position: int) -> bool:
    """Whether a byte is in the page cache; False if the system does not say."""
    try:
        return os.preadv(file, [bytearray(1)], position, os.RWF_NOWAIT) == 1
    except (OSError, AttributeError):
        return False
