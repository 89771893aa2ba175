"""Writes the calls of scheduler cores to files, one for each attachment of a worker.

A call costs the event loop a tuple and an append. A thread encodes and writes what has gathered, a
few times a second; plans, outcomes and requests are immutable, so it can do that later. A process
that is killed loses the last quarter of a second; one that fails or ends loses nothing.
"""

import asyncio
import contextlib
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO, Final, ParamSpec, Self, TypeVar

import structlog

from contract.info import MemoryLevel, WorkerInfo
from contract.state import Holdings
from contract.step import Plan, Result
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import Finished, StepEvents
from scheduler_svc.core.handover.moved_request import (
    Export,
    ExportId,
    Import,
    ImportId,
    MovedRequest,
)
from scheduler_svc.core.request import Request, SeqKey, SourceId
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.journal.core_calls import (
    BeginExport,
    BeginImport,
    Call,
    Cancel,
    CancelSource,
    CoreOrigin,
    Defragment,
    End,
    EndExport,
    EndImport,
    Inherit,
    Resize,
    Schedule,
    SetMemoryLevel,
    Shrink,
    Submit,
    Update,
)
from scheduler_svc.journal.frames import MAGIC, RecordingError, to_frame
from scheduler_svc.journal.recording_wire import call_to_payload, end_to_payload, origin_to_payload

SUFFIX: Final = ".quirerec"
_FLUSH_S: Final = 0.25
_MAX_PENDING_CALLS: Final = 100_000
"""A disk that is so far behind would have us fill the memory instead."""
_FULL: Final = End("--record-max-mb is reached")

log = structlog.get_logger()

_Args = ParamSpec("_Args")
_T = TypeVar("_T")


class RecordingScheduler(Scheduler):
    """A core whose calls are told to `record`, with what they gave or raised."""

    def __init__(
        self,
        config: SchedulerConfig,
        record: Callable[[Call, Plan | None, str], None],
        clock: Callable[[], float],
    ) -> None:
        """`clock` gives the time of calls that are given none: that of the `now` of the others."""
        super().__init__(config)
        self._record = record
        self._clock = clock

    def submit(self, request: Request, now: float) -> None:
        """See `Scheduler`."""
        self._recorded(Submit(request, now), super().submit, request, now)

    def inherit(self, holdings: Holdings, now: float) -> None:
        """See `Scheduler`."""
        self._recorded(Inherit(holdings, now), super().inherit, holdings, now)

    def cancel(self, source: SourceId, seq_keys: Iterable[int]) -> tuple[Finished, ...]:
        """See `Scheduler`."""
        keys = tuple(seq_keys)
        return self._recorded(Cancel(source, keys), super().cancel, source, keys)

    def cancel_source(self, source: SourceId) -> None:
        """See `Scheduler`."""
        self._recorded(CancelSource(source), super().cancel_source, source)

    def defragment(self) -> None:
        """See `Scheduler`."""
        self._recorded(Defragment(), super().defragment)

    def shrink(self, num_blocks: int) -> None:
        """See `Scheduler`."""
        self._recorded(Shrink(num_blocks), super().shrink, num_blocks)

    def resize(self, num_blocks: int) -> None:
        """See `Scheduler`."""
        self._recorded(Resize(num_blocks), super().resize, num_blocks)

    def set_memory_level(self, level: MemoryLevel) -> None:
        """See `Scheduler`."""
        self._recorded(SetMemoryLevel(level), super().set_memory_level, level)

    def schedule(
        self,
        now: float,
        max_paced_tokens: int | None = None,
        max_prompt_tokens: int | None = None,
    ) -> Plan | None:
        """See `Scheduler`."""
        call = Schedule(now, max_paced_tokens, max_prompt_tokens)
        bounds = (max_paced_tokens, max_prompt_tokens)
        return self._recorded(call, super().schedule, now, *bounds)

    def update(self, outcome: Result) -> StepEvents:
        """See `Scheduler`."""
        return self._recorded(Update(outcome, self._clock()), super().update, outcome)

    def begin_export(self, source: SourceId, first_seq_key: SeqKey) -> Export:
        """See `Scheduler`."""
        call = BeginExport(source, first_seq_key)
        return self._recorded(call, super().begin_export, source, first_seq_key)

    def end_export(self, export_id: ExportId, *, leaves: bool) -> tuple[int, ...]:
        """See `Scheduler`."""
        call = EndExport(export_id, leaves)
        return self._recorded(call, super().end_export, export_id, leaves=leaves)

    def begin_import(self, moved: MovedRequest) -> Import:
        """See `Scheduler`."""
        return self._recorded(BeginImport(moved), super().begin_import, moved)

    def end_import(self, import_id: ImportId, output_indices: Collection[int]) -> None:
        """See `Scheduler`."""
        indices = tuple(output_indices)
        self._recorded(EndImport(import_id, indices), super().end_import, import_id, indices)

    def _recorded(
        self,
        call: Call,
        function: Callable[_Args, _T],
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> _T:
        try:
            answer = function(*args, **kwargs)
        except Exception as error:
            self._record(call, None, type(error).__name__)
            raise
        self._record(call, answer if isinstance(answer, Plan) else None, "")
        return answer


class Recordings:
    """The recordings of one process, and the thread that writes them, until the `with` ends."""

    def __init__(self, directory: Path, max_bytes: int, epoch: int) -> None:
        """Make `directory` if there is none; all recordings together take at most `max_bytes`.

        Raises:
            RecordingError: Nothing can be written there.
        """
        self._directory = directory
        self._max_bytes = max_bytes
        self._epoch = epoch
        self._num_bytes = 0
        self._num_opened = 0
        self._open: list[_Recording] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recordings", daemon=True)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordingError(
                f"--record: {directory}: cannot be made: {error.strerror}"
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
        """Make the core for a worker; it is recorded until the `with` ends, if there is room."""
        recording = self._begin(info, config)
        if recording is None:
            yield Scheduler(config)
            return
        reason = "the worker is lost"
        try:
            yield RecordingScheduler(config, recording.add, clock)
        except asyncio.CancelledError:
            reason = "the scheduler has ended"
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            recording.end(reason)

    def _begin(self, info: WorkerInfo, config: SchedulerConfig) -> "_Recording | None":
        if self._num_bytes >= self._max_bytes:
            return None
        self._num_opened += 1
        name = re.sub(r"[^\w.-]", "_", info.worker_id) or "worker"
        path = self._directory / f"{name}-{self._epoch}-{self._num_opened}{SUFFIX}"
        origin = CoreOrigin(version("quire"), info.worker_id, self._epoch, time.time(), config)
        try:
            recording = _Recording(path, path.open("xb"), origin)
        except OSError as error:
            log.error("a core is not recorded", path=str(path), reason=str(error))  # noqa: TRY400
            return None
        log.info("recording", path=str(path))
        self._open.append(recording)
        return recording

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stop.wait(_FLUSH_S)
            for recording in list(self._open):
                if is_last:
                    recording.end("the scheduler has ended")
                self._num_bytes += recording.write_gathered(self._max_bytes - self._num_bytes)
                if recording.is_closed:
                    self._open.remove(recording)


class _Recording:
    """One file. `add` and `end` are called by the event loop, the rest by the writing thread."""

    def __init__(self, path: Path, file: BinaryIO, origin: CoreOrigin) -> None:
        self.is_closed = False
        self._path = path
        self._file = file
        self._is_over = False
        """Whether there is, or will be, an end in the file: nothing may follow it."""
        self._gathered: deque[tuple[Call, Plan | None, str] | End] = deque()
        self._begin = MAGIC + to_frame(origin_to_payload(origin))

    def add(self, call: Call, plan: Plan | None, raised: str) -> None:
        """Have a call written, soon."""
        if self._is_over:
            return
        self._gathered.append((call, plan, raised))
        if len(self._gathered) > _MAX_PENDING_CALLS:
            self._give_up(f"the disk is {_MAX_PENDING_CALLS} calls behind")

    def end(self, reason: str) -> None:
        """Have the file ended, soon, unless it is."""
        if not self._is_over:
            self._is_over = True
            self._gathered.append(End(reason))

    def write_gathered(self, max_bytes: int) -> int:
        """Write what has gathered, but no more than `max_bytes`; give how much it was."""
        frames, self._begin = ([self._begin] if self._begin else []), b""
        num_bytes = sum(map(len, frames))
        is_full = is_ended = False
        while self._gathered and not is_ended:
            match self._gathered.popleft():
                case End() as end:
                    frames.append(to_frame(end_to_payload(_FULL if is_full else end)))
                    is_ended = True
                case call, plan, raised if not is_full:
                    frame = to_frame(call_to_payload(call, plan, raised))
                    num_bytes += len(frame)
                    if num_bytes <= max_bytes:
                        frames.append(frame)
                    else:
                        is_full = True
                        self._give_up(_FULL.reason)
        try:
            self._file.write(b"".join(frames))
            self._file.flush()
        except OSError as error:
            self._give_up(str(error))
            is_ended = True
        if is_ended:
            self.is_closed = True
            with contextlib.suppress(OSError):  # what it could not write is lost either way
                self._file.close()
        return num_bytes

    def _give_up(self, reason: str) -> None:
        """Record no more, but serve on."""
        log.error("recording has stopped", path=str(self._path), reason=reason)
        self.end(reason)
