"""Has workers unload their models and load them again, so that no request is lost by it.

Before its model goes, a worker is emptied: nothing new is placed there, what can be moved with its
KV to another worker is, no more steps are sent. What is left then goes on elsewhere as after a
loss, or waits until a worker is there.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace

import structlog

from contract.errors import QuireError, UnavailableError, UnimplementedError
from rpc.tasks import merged, retrieve
from scheduler_svc.operations.adapters import said_by
from scheduler_svc.operations.drainer import Drainer
from scheduler_svc.operations.worker_loading import LoadProgress, WorkerLoading
from scheduler_svc.workers.engine import Engine
from scheduler_svc.workers.roster import Roster
from scheduler_svc.workers.session import Session

_NOTICE_S = 15.0
"""How long an engine may take to notice what its worker has done; settling comes on top."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class UnloadedWorker:
    """A worker without a model."""

    worker: str
    """Its target."""
    was_unloaded: bool
    """Whether it was so before."""


class Loading:
    """What is asked of one worker, by its target, or of all; one thing at a time at each."""

    def __init__(
        self,
        roster: Roster,
        drainer: Drainer,
        workers: WorkerLoading,
        *,
        on_stay: Callable[[], None],
    ) -> None:
        """`on_stay` is called when a worker takes requests again that was to give up its model."""
        self._roster = roster
        self._on_stay = on_stay
        self._drainer = drainer
        self._workers = workers
        self._unloads: dict[str, asyncio.Task[bool]] = {}

    async def unload(self, worker: str) -> Sequence[UnloadedWorker]:
        """Have models unloaded, which goes on if the caller leaves.

        Raises:
            NotFoundError: There is no such worker.
            UnimplementedError: A worker keeps its model; then all do.
            FailedPreconditionError: One is being loaded; others may be unloaded by then.
            UnavailableError: One is not there, or lost meanwhile.
            QuireError: What a worker says; others may be unloaded by then.
        """
        engines = self._roster.chosen(worker)
        sessions = {
            engine: _session_of(engine) for engine in engines if not self._is_unloading(engine)
        }
        for session in sessions.values():
            if session is not None:
                session.leave()  # all, before one is emptied: not into another that goes
        for engine, session in sessions.items():
            task = asyncio.create_task(self._unload(engine, session), name="unloading a worker")
            task.add_done_callback(retrieve)
            self._unloads[engine.target] = task
        tasks = [self._unloads[engine.target] for engine in engines]
        ends = await asyncio.gather(*map(asyncio.shield, tasks), return_exceptions=True)
        unloaded = []
        for engine, end in zip(engines, ends, strict=True):
            if isinstance(end, BaseException):
                raise end
            unloaded.append(UnloadedWorker(engine.target, was_unloaded=end))
        return unloaded

    async def load(self, worker: str, directory: str) -> AsyncGenerator[LoadProgress]:
        """Have models loaded, and tell how far that is; the workers go on if nobody listens.

        The last that is told of a worker `is_done`: it is attached. One that is being unloaded is
        loaded when it is.

        Raises:
            NotFoundError: There is no such worker.
            UnavailableError: One is not attached, or lost meanwhile.
            QuireError: What a worker says, when all others are loaded.
        """
        engines = self._roster.chosen(worker)
        for engine in engines:
            is_here = engine.session is not None or self._is_unloading(engine)
            if not is_here and not engine.was_unloaded:
                raise _not_attached(engine)
        loads = merged([self._load(engine, directory) for engine in engines])
        async with contextlib.aclosing(loads):
            async for told in loads:
                yield told

    def stop(self) -> None:
        """Give up what is under way; the sessions end."""
        for task in self._unloads.values():
            task.cancel()

    def _is_unloading(self, engine: Engine) -> bool:
        task = self._unloads.get(engine.target)
        return task is not None and not task.done()

    async def _unload(self, engine: Engine, session: Session | None) -> bool:
        """Whether it was so before: the worker knows, and refuses while it loads its model."""
        log.info("a worker's model is to be unloaded", worker=engine.target)
        try:
            if session is not None:
                await self._drainer.move_away(engine, session)
                await session.hand_over()
                session.check_alive()
            was_unloaded = await self._workers.unload(engine.target)
        except QuireError as error:
            if session is not None:
                session.stay()
                self._on_stay()
            log.warning("a model stays", worker=engine.target, reason=str(error))
            raise said_by(engine.target, error) from error
        await _wait_noticed(engine, lambda: engine.is_unloaded, "is unloaded, not attached")
        log.info("a worker's model is unloaded", worker=engine.target)
        return was_unloaded

    async def _load(self, engine: Engine, directory: str) -> AsyncGenerator[LoadProgress]:
        last = LoadProgress(engine.target, "")
        if self._is_unloading(engine):
            yield replace(last, status="being unloaded")
            await asyncio.wait([self._unloads[engine.target]])
        try:
            loading = self._workers.load(engine.target, directory)
            async with contextlib.aclosing(loading):
                async for last in loading:
                    if not last.is_done:
                        yield last
            yield replace(last, status="being attached", is_done=False)
            await _wait_noticed(engine, lambda: engine.session is not None, "is loaded, not used")
            yield last
        except QuireError as error:
            raise said_by(engine.target, error) from error


def _session_of(engine: Engine) -> Session | None:
    """Return that of a worker; None: it has none, and what its model is, it knows itself."""
    if engine.session is None:
        return None
    if not engine.session.info.can_unload:
        raise UnimplementedError(
            f"worker {engine.target} keeps its model: it is on several devices"
            " (tensor_parallel_size, pipeline_parallel_size), or simulated"
        )
    return engine.session


async def _wait_noticed(engine: Engine, condition: Callable[[], bool], what: str) -> None:
    """Wait until an engine, which attaches again and again, has seen what its worker has done."""
    left_s = _NOTICE_S
    while not condition():
        started = time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                await engine.wait_until(lambda: condition() or engine.is_settling)
        except TimeoutError:
            raise UnavailableError(f"it {what}: {engine.loss}") from None
        left_s -= time.monotonic() - started
        # Each adapter that is loaded again has a limit of its own.
        await engine.wait_until(lambda: condition() or not engine.is_settling)


def _not_attached(engine: Engine) -> UnavailableError:
    return UnavailableError(f"worker {engine.target} is not attached: {engine.loss}")
