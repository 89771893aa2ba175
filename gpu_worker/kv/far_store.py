"""The far tier: keeps KV blocks in a store that workers and cells share and that fsspec can access.

Each block is an object, named by its label, in a directory that identifies the model and the KV's
layout. An object's header repeats the label and has a checksum. If a load finds that the label or
the checksum is wrong, or that bytes are missing, it deletes the object.

Daemon threads call the store, because it may hang. Loads and stores have separate threads, so that
loads never wait behind stores. A load waits at most `_LOAD_S` for a thread, then at most `_LOAD_S`
for the store. After several failures in a row, the worker does not use the store for a time.
"""

import asyncio
import contextlib
import os
import queue
import re
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from time import monotonic
from typing import Any, Final, TypeVar

import structlog
from isal import isal_zlib

from gpu_worker import metrics

_MAGIC: Final = b"QuireFr1"
_HEADER: Final = struct.Struct("<8s32sQI")
"""Magic, label, length of the content in bytes, CRC-32 of the content."""
_NUM_THREADS: Final = 8
"""Number of threads for loads, and number of threads for all other calls."""
_LOAD_S: Final = 2.0
_MAX_FAILURES: Final = 3
_FIRST_PAUSE_S, _LAST_PAUSE_S = 5.0, 300.0
_MAX_STORING_BYTES: Final = 256 * 1024**2
"""At most this many bytes wait to be stored; further blocks are not stored."""
_SWEEP_SHARE: Final = 1 / 16
"""Whenever a worker has stored this share of `max_bytes`, it deletes old objects (`_sweep`)."""
_OBJECT: Final = re.compile(r"/quire-kv/[0-9a-f]{32}/[0-9a-f]{2}/[0-9a-f]{64}(\.\d+-\d+)?$")
"""Matches the paths of objects, and of temporary files that a killed process left."""
_TIMES: Final = ("mtime", "LastModified", "last_modified", "updated", "created")
"""The keys under which fsspec's file systems give the time of an object's last change."""

_T = TypeVar("_T")
_Work = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]

_log = structlog.get_logger()


class FarStore:
    """Blocks in a shared store. Called from one event loop."""

    def __init__(self, system: Any, root: str, identity: bytes, max_bytes: int) -> None:
        """Open the store in the directory `root` of `system`, an fsspec file system.

        `identity` stands for the model and the KV's layout. When blocks take more than about
        `max_bytes` in `root`, the oldest are deleted.
        """
        self._system = system
        self._root = f"{root}/quire-kv"
        self._directory = f"{self._root}/{identity.hex()[:32]}"
        self._max_bytes = max_bytes
        self._loads: _Work = queue.SimpleQueue()
        self._turns = asyncio.Semaphore(_NUM_THREADS)
        """Each load holds one of these permits, and there are as many permits as threads. So a load
        gets a thread at once, unless loads that timed out still keep threads busy."""
        self._stores: _Work = queue.SimpleQueue()
        self._num_storing_bytes = 0
        self._num_unswept_bytes = max_bytes  # the first store sweeps the directory
        self._num_failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._paused_until_s = 0.0
        for work in (self._loads, self._stores) * _NUM_THREADS:
            threading.Thread(target=_run, args=(work,), name="far-kv", daemon=True).start()

    @property
    def is_paused(self) -> bool:
        """Whether the worker avoids the store for now, because several calls in a row failed."""
        return monotonic() < self._paused_until_s

    def close(self) -> None:
        """Tell the threads to end after all earlier calls, and return at once."""
        for work in (self._loads, self._stores) * _NUM_THREADS:
            work.put(None)

    async def load(self, label: bytes) -> bytes | None:
        """Return a block's content; None if the store lacks it, is paused, fails or is too slow."""
        try:
            async with asyncio.timeout(_LOAD_S):
                await self._turns.acquire()
        except TimeoutError:  # the store is busy, which does not count as a failure
            _count("load", "refused")
            return None
        try:
            if self.is_paused:
                return None
            async with asyncio.timeout(_LOAD_S):
                content = await _call(self._loads, lambda: self._get(label))
        except Exception as error:  # noqa: BLE001 - each storage has its own errors
            self._on_failure("load", error)
            return None
        finally:
            self._turns.release()
        self._num_failures, self._pause_s = 0, _FIRST_PAUSE_S
        _count("load", "done" if content is not None else "missing")
        return content

    def store(self, label: bytes, content: bytes) -> bool:
        """Begin to store a block; return False if the store is paused or too many bytes wait."""
        num_bytes = self._num_storing_bytes + len(content)
        if self.is_paused or num_bytes > max(len(content), _MAX_STORING_BYTES):
            _count("store", "refused")
            return False
        self._num_storing_bytes = num_bytes
        stored = _call(self._stores, lambda: self._put(label, content))

        def on_end(done: "asyncio.Future[None]") -> None:
            self._num_storing_bytes -= len(content)
            if done.cancelled():
                return
            if (error := done.exception()) is not None:
                self._on_failure("store", error)
                return
            _count("store", "done")
            self._num_unswept_bytes += len(content)
            if self._num_unswept_bytes > self._max_bytes * _SWEEP_SHARE:
                self._num_unswept_bytes = 0
                _call(self._stores, self._sweep).add_done_callback(lambda each: each.exception())

        stored.add_done_callback(on_end)
        return True

    def _on_failure(self, move: str, error: BaseException) -> None:
        _count(move, "failed")
        self._num_failures += 1
        if self._num_failures >= _MAX_FAILURES and not self.is_paused:
            _log.warning("the far store failed: pausing", pause_s=self._pause_s, reason=repr(error))
            self._paused_until_s = monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)
            self._num_failures = _MAX_FAILURES - 1  # one more failure pauses the store again

    # --- on the threads -------------------------------------------------------------------------

    def _path(self, label: bytes) -> str:
        name = label.hex()
        return f"{self._directory}/{name[:2]}/{name}"

    def _get(self, label: bytes) -> bytes | None:
        path = self._path(label)
        try:
            data: bytes = self._system.cat_file(path)
        except FileNotFoundError:
            return None
        content = data[_HEADER.size :]
        if data[: _HEADER.size] != _header(label, content):
            _log.warning("a block in the far store is damaged", path=path)
            with contextlib.suppress(Exception):
                self._system.rm_file(path)
            return None
        return content

    def _put(self, label: bytes, content: bytes) -> None:
        path = self._path(label)
        if self._system.exists(path):
            return
        data = _header(label, content) + content
        if "file" in self._system.protocol:
            _write_file(Path(path), data)
        else:  # other storages show no object before it is complete
            self._system.pipe_file(path, data)

    def _sweep(self) -> None:
        """Delete objects, oldest first, until those of all workers take at most `max_bytes`."""
        found = self._system.find(self._root, detail=True).items()
        objects = [
            (_time_of(info), path, info["size"]) for path, info in found if _OBJECT.search(path)
        ]
        num_bytes = sum(size for _, _, size in objects)
        failure: Exception | None = None
        for _, path, size in sorted(objects):
            if num_bytes <= self._max_bytes:
                break
            num_bytes -= size
            try:
                self._system.rm_file(path)
                _count("sweep", "done")
            except FileNotFoundError:  # another worker may sweep at the same time
                continue
            except Exception as error:  # noqa: BLE001 - each storage has its own errors
                _count("sweep", "failed")
                failure = error
        if failure is not None:
            _log.warning("the far store cannot be kept within far_kv_gb", reason=repr(failure))


def open_far_store(url: str, identity: bytes, max_bytes: int) -> FarStore:
    """Open a store by any URL that fsspec knows.

    Raises:
        ImportError: The package for the URL's kind of storage is not installed.
        ValueError: Fsspec does not know the URL's kind of storage.
    """
    import fsspec  # noqa: PLC0415 - an extra

    system, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    return FarStore(system, root.rstrip("/"), identity, max_bytes)


def _call(work: _Work, function: Callable[[], _T]) -> "asyncio.Future[_T]":
    future: Future[_T] = Future()
    work.put((future, function))
    return asyncio.wrap_future(future)


def _run(work: _Work) -> None:
    while (item := work.get()) is not None:
        future, function = item
        if not future.set_running_or_notify_cancel():
            continue  # it timed out before it began
        with contextlib.suppress(RuntimeError):  # the event loop is closed if the process ends
            try:
                result = function()
            except Exception as error:  # noqa: BLE001 - the caller gets it
                future.set_exception(error)
            else:
                future.set_result(result)


def _write_file(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read.

    Until the file is complete, it has another name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    draft.replace(path)


def _header(label: bytes, content: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, label, len(content), isal_zlib.crc32(content))


def _time_of(info: dict[str, Any]) -> str:
    """Return the time of an object's last change, as text; an earlier time sorts first."""
    for key in _TIMES:
        if (when := info.get(key)) is not None:
            return f"{when:020.6f}" if isinstance(when, float | int) else str(when)
    return ""


def _count(move: str, outcome: str) -> None:
    metrics.FAR_BLOCKS.labels(move, outcome).inc()
