"""Records scheduler cores, in one file for each attachment of a worker.

For each call of a core, the event loop only appends a tuple to the pending calls. A few times per
second, a thread encodes and writes the pending calls. The thread can read them without a lock,
because plans, results and requests are immutable. A killed process loses the calls of the last
quarter of a second; a process that fails or ends normally loses no calls.
"""

import asyncio
import contextlib
import functools
import inspect
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, ParamSpec, Self, TypeVar

import structlog

from contract.info import WorkerInfo
from contract.step import Plan
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.journal.entries import (
    FORMAT_VERSION,
    Origin,
    RecordingError,
    encode_entry,
    encode_origin,
)

SUFFIX: Final = ".quirerec"
_FLUSH_S: Final = 0.25
_MAX_PENDING_CALLS: Final = 100_000
"""The limit on pending calls. If there are more, recording stops, to bound the memory."""
_FULL: Final = "--record-max-mb is reached"

_P = ParamSpec("_P")
_R = TypeVar("_R")

log = structlog.get_logger()


class RecordedCall(NamedTuple):
    """A call of the core, with its arguments by name."""

    name: str
    arguments: dict[str, object]
    at: float
    plan: Plan | None = None
    raised: str = ""


class CallRecorder:
    """Records the calls of a core's `core_input` methods, including calls that raise."""

    def __init__(self, record: Callable[[RecordedCall], None], clock: Callable[[], float]) -> None:
        """Pass each call to `record`.

        `clock` gives the time of each call. It must be the clock from which the caller of the core
        reads the time that it passes as `now`.
        """
        self._record = record
        self._clock = clock

    def call(self, method: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        bound = _signature(method).bind(*args, **kwargs)
        for key, value in bound.arguments.items():
            # An argument may be an iterator, which can be read only once.
            if isinstance(value, Iterable) and not isinstance(value, str):
                bound.arguments[key] = tuple(value)
        name, given = method.__name__, dict(bound.arguments)
        del given["self"]
        at = self._clock()
        untyped: Callable[..., _R] = method
        try:
            answer = untyped(*bound.args, **bound.kwargs)
        except Exception as error:
            self._record(RecordedCall(name, given, at, raised=type(error).__name__))
            raise
        self._record(RecordedCall(name, given, at, answer if isinstance(answer, Plan) else None))
        return answer


@functools.cache
def _signature(method: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(method)


class Recordings:
    """The recordings of one process.

    Use this object in a `with` block: a thread writes the recordings until the block ends.
    """

    def __init__(self, directory: Path, max_bytes: int, epoch: int) -> None:
        """Create `directory` if it is missing. All recordings together use at most `max_bytes`.

        Raises:
            RecordingError: The directory cannot be created.
        """
        self._directory = directory
        self._max_bytes = max_bytes
        self._epoch = epoch
        self._num_bytes = 0
        self._num_opened = 0
        self._open: list[_Journal] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recordings", daemon=True)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordingError(
                f"--record: {directory}: cannot be created: {error.strerror}"
            ) from None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    @contextlib.contextmanager
    def open_core(
        self,
        info: WorkerInfo,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> Iterator[Scheduler]:
        """Make the core for a worker, and record its calls until the `with` ends.

        The core is not recorded if the recordings have reached their size limit.
        """
        journal = self._begin(info, config)
        if journal is None:
            yield Scheduler(config)
            return
        core = Scheduler(config, CallRecorder(journal.add, clock))
        reason = "the worker is lost"
        try:
            yield core
        except asyncio.CancelledError:
            reason = "the scheduler has ended"
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            journal.end(reason)

    def _begin(self, info: WorkerInfo, config: SchedulerConfig) -> "_Journal | None":
        if self._num_bytes >= self._max_bytes:
            return None
        self._num_opened += 1
        name = re.sub(r"[^\w.-]", "_", info.worker_id) or "worker"
        path = self._directory / f"{name}-{self._epoch}-{self._num_opened}{SUFFIX}"
        origin = Origin(
            FORMAT_VERSION,
            version("quire"),
            info.worker_id,
            self._epoch,
            time.time(),
            asdict(config),
        )
        try:
            journal = _Journal(path, path.open("xb"), origin)
        except OSError as error:
            log.error("a core is not recorded", path=str(path), reason=str(error))  # noqa: TRY400
            return None
        log.info("recording", path=str(path))
        self._open.append(journal)
        return journal

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stop.wait(_FLUSH_S)
            for journal in list(self._open):
                if is_last:
                    journal.end("the scheduler has ended")
                self._num_bytes += journal.write_pending(self._max_bytes - self._num_bytes)
                if journal.is_closed:
                    self._open.remove(journal)


class _Journal:
    """The file of one recording.

    The event loop calls `add`, the thread of `Recordings` calls `write_pending`, and both call
    `end`.
    """

    def __init__(self, path: Path, file: BinaryIO, origin: Origin) -> None:
        self.is_closed = False
        self._path = path
        self._file = file
        self._is_over = False
        """Whether the end of the recording is written or pending. No call may follow the end."""
        self._pending: deque[RecordedCall] = deque()
        self._begin = encode_origin(origin)

    def add(self, call: RecordedCall) -> None:
        """Append a call to the pending calls, unless the recording has ended."""
        if self._is_over:
            return
        self._pending.append(call)
        if len(self._pending) > _MAX_PENDING_CALLS:
            self._give_up(f"the disk is {_MAX_PENDING_CALLS} calls behind")

    def end(self, reason: str) -> None:
        """Append the end of the recording to the pending calls, if the recording has not ended."""
        if not self._is_over:
            self._is_over = True
            self._pending.append(RecordedCall("", {}, 0.0, raised=reason))

    def write_pending(self, max_bytes: int) -> int:
        """Write the pending calls, up to `max_bytes`; return the number of bytes written."""
        frames, self._begin = ([self._begin] if self._begin else []), b""
        num_bytes = sum(map(len, frames))
        is_full = is_ended = False
        while self._pending and not is_ended:
            call = self._pending.popleft()
            if is_full and call.name:
                continue
            if not call.name and is_full:
                call = call._replace(raised=_FULL)
            frame = encode_entry(*call)
            num_bytes += len(frame)
            if call.name and num_bytes > max_bytes:
                num_bytes -= len(frame)
                is_full = True
                self._give_up(_FULL)
                continue
            frames.append(frame)
            is_ended = not call.name
        try:
            self._file.write(b"".join(frames))
            self._file.flush()
        except OSError as error:
            self._give_up(str(error))
            is_ended = True
        if is_ended:
            self.is_closed = True
            with contextlib.suppress(OSError):  # unwritten data is lost in any case
                self._file.close()
        return num_bytes

    def _give_up(self, reason: str) -> None:
        """Stop recording to this file; the scheduler continues to serve."""
        log.error("recording has stopped", path=str(self._path), reason=reason)
        self.end(reason)
