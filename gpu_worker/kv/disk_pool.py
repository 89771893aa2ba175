"""The disk tier of KV memory: separate threads copy blocks between host memory and the disk.

Symbols: `BH` host blocks, `BD` disk blocks, `E` bytes of a host block.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import StrEnum, auto
from pathlib import Path
from typing import TypeAlias

import numpy as np
import structlog

from contract.arrays import Int32Array, Labels
from contract.hashing import HASH_BYTES
from gpu_worker import metrics
from gpu_worker.kv.codecs.records import Bytes, RecordCodec
from gpu_worker.kv.disk_file import DiskFile

_NUM_STORING, _NUM_LOADING = 2, 4
"""Numbers of threads. Loads have separate threads, so that they never wait behind stores. There are
more threads for loads, because sequences wait for loads."""
_STAGING_BYTES = 256 * 1024**2
_MAX_WAIT_S = 0.25
"""The stores of a step together wait at most this long for room in the staging area."""

_Work: TypeAlias = Callable[[int, int], int]
"""Moves a block from source to target; returns the bytes read or written on disk."""

_log = structlog.get_logger()


class _MoveKind(StrEnum):
    STORE = auto()
    LOAD = auto()


@dataclass(frozen=True, slots=True, eq=False)
class _Move:
    kind: _MoveKind
    target: int
    """Disk block of a store, host block of a load."""
    step_id: int


@dataclass(frozen=True, slots=True, eq=False)
class EndedMoves:
    """The targets of moves that have ended."""

    stored: Int32Array
    """Disk blocks."""
    failed_stores: Int32Array
    loaded: Int32Array
    """Host blocks."""
    failed_loads: Int32Array


_NONE = np.empty(0, np.int32)
NO_ENDED_MOVES = EndedMoves(_NONE, _NONE, _NONE, _NONE)


class DiskPool:
    """Disk blocks [0, num_blocks). Called from one thread.

    The scheduler allocates the blocks; the pool does not know which sequences use them.

    `store` copies its source blocks at once to a staging area of bounded size. If this area is
    full, `store` waits briefly. If there is still no room for a block, the store of this block
    fails, because waiting for a slow disk would delay all sequences. A failed store loses only a
    cached block, or makes one sequence recompute.
    """

    def __init__(
        self,
        host_blocks: Bytes,
        num_blocks: int,
        directory: Path,
        codec: RecordCodec | None = None,
        identity: bytes | None = None,
    ) -> None:
        """Create the file and start the threads.

        Args:
            host_blocks: uint8[BH, E], the memory of the host blocks.
            num_blocks: Number of disk blocks, BD.
            directory: Where to create the file.
            codec: How blocks are encoded on disk; None: as on the host.
            identity: Identifies the model and layout of the KV. A file with an identity outlives
                this process, and the next process with the same identity finds the file's blocks.
                None: the file has no name.

        Raises:
            OSError: No file can be created in `directory`.
        """
        self.num_blocks = num_blocks
        self._host_blocks = host_blocks
        self._block_bytes = host_blocks.shape[1]
        self._file = DiskFile(num_blocks, self._block_bytes, directory, codec, identity)
        num_staged = max(_NUM_STORING, _STAGING_BYTES // self._block_bytes)
        num_staged = min(num_staged, num_blocks)
        self._staging = np.empty((num_staged, self._block_bytes), np.uint8)
        self._free_staging: queue.SimpleQueue[int]
        self._free_all_staging()
        self._storing = ThreadPoolExecutor(_NUM_STORING, "disk-store")
        self._loading = ThreadPoolExecutor(_NUM_LOADING, "disk-load")
        self._lock = threading.Lock()
        """Guards `_under_way` and `_ended`, which disk threads change."""
        self._under_way: dict[_Move, Future[None]] = {}
        """Moves in flight, in the order of their steps."""
        self._ended: list[tuple[_Move, bool]] = []
        """Ended moves, and whether each succeeded."""
        self._logged: set[_MoveKind] = set()

    def take_found(self) -> tuple[Int32Array, Labels]:
        """Return the blocks that an earlier process has stored and labelled, oldest first.

        Returns:
            int32[N] blocks and uint8[N, 32] labels.
        """
        found, self._file.found = self._file.found, {}
        labels = np.frombuffer(b"".join(each.label for each in found.values()), np.uint8)
        return np.array(list(found), np.int32), labels.reshape(len(found), HASH_BYTES)

    def scratch(self, count: int) -> Int32Array:
        """Return int32[count] blocks that a measurement may overwrite.

        Blocks without labels come first, then the blocks with labels, oldest first.
        """
        oldest = np.array(list(self._file.found), np.int32)
        empty = np.setdiff1d(np.arange(self.num_blocks, dtype=np.int32), oldest)
        return np.concatenate([empty, oldest])[:count]

    def name(self, blocks: Int32Array, labels: Labels) -> None:
        """Write the labels of stored blocks to the disk, for the next process.

        Args:
            blocks: int32[N].
            labels: uint8[N, 32].
        """
        for block, label in zip(blocks.tolist(), labels, strict=True):
            try:
                self._file.name(block, label.tobytes())
            except OSError as error:
                self._warn_once(_MoveKind.STORE, error)

    def distrust(self, blocks: Int32Array | None = None) -> None:
        """Erase the labels of `blocks`, whose content may be wrong; None: of all blocks.

        No later process uses a block without a label.
        """
        self._file.distrust(None if blocks is None else blocks.tolist())

    def store(self, src: Int32Array, dst: Int32Array, step_id: int) -> None:
        """Start storing host blocks `src`, as they are now, to disk blocks `dst`.

        Args:
            src: int32[N] host blocks; must not change during the call.
            dst: int32[N] disk blocks, parallel to `src`; no move of them is in flight.
            step_id: The step of the moves; not less than in earlier calls of `store` and `load`.
        """
        deadline_s = time.monotonic() + _MAX_WAIT_S
        for host_block, disk_block in zip(src.tolist(), dst.tolist(), strict=True):
            move = _Move(_MoveKind.STORE, disk_block, step_id)
            self._file.forget(disk_block)
            try:
                wait_s = max(0.0, deadline_s - time.monotonic())
                place = self._free_staging.get(timeout=wait_s)
            except queue.Empty:
                self._warn_once(_MoveKind.STORE, TimeoutError("the disk cannot keep up"))
                self._end(move, is_good=False)
                continue
            np.copyto(self._staging[place], self._host_blocks[host_block])
            self._start(self._storing, move, self._write, place, disk_block)

    def load(self, src: Int32Array, dst: Int32Array, step_id: int) -> None:
        """Start loading disk blocks `src` to host blocks `dst`.

        Args:
            src: int32[N] disk blocks.
            dst: int32[N] host blocks, parallel to `src`; must not be used until the load has ended.
            step_id: The step of the moves; not less than in earlier calls of `store` and `load`.
        """
        for disk_block, host_block in zip(src.tolist(), dst.tolist(), strict=True):
            move = _Move(_MoveKind.LOAD, host_block, step_id)
            self._start(self._loading, move, self._read, disk_block, host_block)

    def has_ended_moves(self, step_id: int) -> bool:
        """Whether a move of step `step_id` or earlier has ended since the last `take_ended`."""
        with self._lock:
            return any(move.step_id <= step_id for move, _ in self._ended)

    def is_busy(self, step_id: int) -> bool:
        """Whether a move of step `step_id` or earlier is in flight."""
        with self._lock:
            oldest = next(iter(self._under_way), None)
        return oldest is not None and oldest.step_id <= step_id

    def take_ended(self, step_id: int) -> EndedMoves:
        """Return the moves of steps up to `step_id` that have ended since the last call."""
        if not self._ended:  # true in most steps
            return NO_ENDED_MOVES
        with self._lock:
            taken = [each for each in self._ended if each[0].step_id <= step_id]
            self._ended = [each for each in self._ended if each[0].step_id > step_id]

        def targets(kind: _MoveKind, *, good: bool) -> Int32Array:
            chosen = [m.target for m, is_good in taken if m.kind is kind and is_good == good]
            return np.array(chosen, np.int32)

        return EndedMoves(
            stored=targets(_MoveKind.STORE, good=True),
            failed_stores=targets(_MoveKind.STORE, good=False),
            loaded=targets(_MoveKind.LOAD, good=True),
            failed_loads=targets(_MoveKind.LOAD, good=False),
        )

    def synchronize(self) -> None:
        with self._lock:
            futures = tuple(self._under_way.values())
        wait(futures)

    def drain(self) -> None:
        """Drop all moves: cancel those that have not begun, wait for the others.

        Afterwards no thread touches any block.
        """
        with self._lock:
            futures = tuple(self._under_way.values())
        for future in futures:
            future.cancel()
        self.synchronize()
        self._under_way.clear()
        self._ended.clear()
        self._free_all_staging()

    def _free_all_staging(self) -> None:
        self._free_staging = queue.SimpleQueue()
        for place in range(len(self._staging)):
            self._free_staging.put(place)

    def forget_cached_pages(self) -> None:
        """Make the next loads come from the disk, not from the page cache."""
        self._file.forget_cached_pages()

    def close(self) -> None:
        """Drain, then close the file. Must be the last call.

        A file that has no name disappears when it is closed.
        """
        self.drain()
        self._storing.shutdown()
        self._loading.shutdown()
        self._file.close()

    def _start(
        self, threads: ThreadPoolExecutor, move: _Move, work: _Work, source: int, target: int
    ) -> None:
        with self._lock:  # register the move before it can end
            self._under_way[move] = threads.submit(self._run, move, work, source, target)

    def _run(self, move: _Move, work: _Work, source: int, target: int) -> None:
        """Make a move, on one of the threads."""
        try:
            start_s = time.perf_counter()
            num_bytes = work(source, target)
        except Exception as error:  # noqa: BLE001 - whatever the system or a codec may raise
            self._warn_once(move.kind, error)
            self._end(move, is_good=False)
        else:
            direction = "out" if move.kind is _MoveKind.STORE else "in"
            metrics.count_transfer("disk", direction, num_bytes, time.perf_counter() - start_s)
            self._end(move, is_good=True)

    def _end(self, move: _Move, *, is_good: bool) -> None:
        with self._lock:
            self._under_way.pop(move, None)  # absent if the move never began
            self._ended.append((move, is_good))
        metrics.DISK_MOVES.labels(move.kind, "done" if is_good else "failed").inc()

    def _write(self, place: int, disk_block: int) -> int:
        try:
            return self._file.write(disk_block, self._staging[place])
        finally:
            self._free_staging.put(place)

    def _read(self, disk_block: int, host_block: int) -> int:
        try:
            return self._file.read(disk_block, self._host_blocks[host_block])
        except Exception:
            self._file.forget(disk_block)
            raise

    def _warn_once(self, kind: _MoveKind, problem: Exception) -> None:
        """Log only the first failure of each kind of move: a full disk causes thousands."""
        if kind not in self._logged:
            self._logged.add(kind)
            _log.warning("a disk move of a KV block failed", move=kind, problem=str(problem))
