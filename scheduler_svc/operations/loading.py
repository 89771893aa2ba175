"""Operators' calls that the scheduler passes on: unload and load models, drain workers.

Before its model goes, a worker is emptied so that no request is lost: it gets no new requests,
requests that can be moved with their KV are, and no more steps are sent. The others then continue
elsewhere as after a loss, or wait until a worker is attached.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

import structlog

from contract.errors import QuireError, UnavailableError, UnimplementedError
from quire.v1 import admin_pb2, admin_pb2_grpc, loading_pb2, loading_pb2_grpc
from rpc.peers.channel import open_channel
from rpc.security.tls import ClientTls
from rpc.status import calling
from rpc.tasks import merged, responses, retrieve
from scheduler_svc.operations.migration import Drainer
from scheduler_svc.workers.engine import Engine
from scheduler_svc.workers.roster import Roster, ask_all, said_by
from scheduler_svc.workers.session import Session
from scheduler_svc.workers.stream import ADAPTER_TIMEOUT_S

_UNLOAD_TIMEOUT_S = ADAPTER_TIMEOUT_S + 60.0
"""Longer than the worker waits for an adapter that it is loading; otherwise a model would be
reported as staying that then goes."""
_NOTICE_S = 15.0
"""How long an engine may take to notice what its worker has done, apart from settling."""

log = structlog.get_logger()


class WorkerCalls:
    """Calls the operators' services of workers, under one epoch; raises the workers' QuireErrors.

    It opens a channel for each call, because the link's is closed when the model goes.
    """

    def __init__(self, epoch: int, tls: ClientTls | None) -> None:
        self._epoch = epoch
        self._tls = tls

    async def unload(self, target: str) -> bool:
        """Have a worker release its device, and wait for it; return whether it had before."""
        request = loading_pb2.UnloadRequest(epoch=self._epoch)
        async with open_channel(target, tls=self._tls) as channel:
            stub = loading_pb2_grpc.LoadingServiceStub(channel)  # type: ignore[no-untyped-call]
            with calling():
                answer = await stub.Unload(request, timeout=_UNLOAD_TIMEOUT_S)
        return all(each.was_unloaded for each in answer.workers)

    async def load(self, target: str, directory: str) -> AsyncGenerator[loading_pb2.LoadResponse]:
        """Have a worker load a model; yield its progress, and end when it is loaded."""
        request = loading_pb2.LoadRequest(directory=directory, epoch=self._epoch)
        async with open_channel(target, tls=self._tls) as channel:
            stub = loading_pb2_grpc.LoadingServiceStub(channel)  # type: ignore[no-untyped-call]
            async with contextlib.aclosing(responses(stub.Load(request))) as loading:
                async for progress in loading:
                    progress.worker = target  # it says its own name
                    yield progress

    async def drain(self, target: str) -> AsyncIterator[int]:
        """Have a worker drain; yield how many of its sequences are live until it has drained."""
        has_begun = False
        async with open_channel(target, tls=self._tls) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]
            try:
                drain = responses(stub.Drain(admin_pb2.DrainRequest()))
                async with contextlib.aclosing(drain) as draining:
                    async for answer in draining:
                        has_begun = True
                        yield answer.num_live
            except UnavailableError:
                if not has_begun:  # otherwise it ended before it could report the last one
                    raise


class Loading:
    """Loads and unloads the model of one worker, or of all; one call at a time at each worker."""

    def __init__(
        self,
        roster: Roster,
        drainer: Drainer,
        calls: WorkerCalls,
        *,
        on_stay: Callable[[], None],
    ) -> None:
        """`on_stay` is called when a model stays after all: its worker takes requests again."""
        self._roster = roster
        self._drainer = drainer
        self._calls = calls
        self._on_stay = on_stay
        self._unloads: dict[str, asyncio.Task[bool]] = {}

    async def unload(self, worker: str) -> Mapping[str, bool]:
        """Unload the model of a worker, or of all. Continues if the caller is cancelled.

        Returns:
            For each worker whether it was unloaded before.

        Raises:
            NotFoundError: There is no such worker.
            UnimplementedError: A worker cannot unload its model; then none does.
            FailedPreconditionError: A worker is loading its model.
            UnavailableError: A worker cannot be reached, or is lost before it is done.
            QuireError: Another error of a worker. After any of the last three, other workers may
                be unloaded.
        """
        engines = self._roster.chosen(worker)
        sessions = {
            engine: _session_of(engine) for engine in engines if not self._is_unloading(engine)
        }
        for session in sessions.values():
            if session is not None:
                session.leave()  # all of them first: none may be emptied into another
        for engine, session in sessions.items():
            task = asyncio.create_task(self._unload(engine, session), name="unloading a worker")
            task.add_done_callback(retrieve)
            self._unloads[engine.target] = task
        tasks = {engine.target: self._unloads[engine.target] for engine in engines}
        was_unloaded, errors = await ask_all(tasks, asyncio.shield)
        for error in errors.values():
            raise error
        return was_unloaded

    async def load(self, worker: str, directory: str) -> AsyncGenerator[loading_pb2.LoadResponse]:
        """Load the model of a worker, or of all; yield their progress.

        The workers continue if the caller is cancelled. The last progress of a worker `is_done`: it
        is attached then. A worker that is unloading its model loads it afterwards.

        Raises:
            NotFoundError: There is no such worker.
            UnavailableError: A worker is not attached, or is lost before it is done.
            QuireError: A worker's error, once all others are done.
        """
        engines = self._roster.chosen(worker)
        for engine in engines:
            is_here = engine.session is not None or self._is_unloading(engine)
            if not is_here and not engine.was_unloaded:
                engine.attached_session()
        loads = merged([self._load(engine, directory) for engine in engines])
        async with contextlib.aclosing(loads):
            async for progress in loads:
                yield progress

    def drain_worker(self, worker: str) -> AsyncIterator[int]:
        """Drain a worker as if it had been asked itself; yields how many sequences are live there.

        Raises:
            NotFoundError: There is no such worker.
            QuireError: The worker's error, such as that it does not obey this scheduler.
        """
        return self._calls.drain(self._roster.engine(worker).target)

    def stop(self) -> None:
        """Cancel calls in progress; the sessions end."""
        for task in self._unloads.values():
            task.cancel()

    def _is_unloading(self, engine: Engine) -> bool:
        task = self._unloads.get(engine.target)
        return task is not None and not task.done()

    async def _unload(self, engine: Engine, session: Session | None) -> bool:
        """Unload one worker's model; return whether it was unloaded before."""
        log.info("a worker's model is to be unloaded", worker=engine.target)
        try:
            if session is not None:
                await self._drainer.move_away(engine, session)
                await session.hand_over()
                session.check_alive()
            was_unloaded = await self._calls.unload(engine.target)
        except QuireError as error:
            if session is not None:
                session.stay()
                self._on_stay()
            log.warning("a model stays", worker=engine.target, reason=str(error))
            raise
        await _wait_noticed(engine, lambda: engine.is_unloaded, "is unloaded, not attached")
        log.info("a worker's model is unloaded", worker=engine.target)
        return was_unloaded

    async def _load(
        self, engine: Engine, directory: str
    ) -> AsyncGenerator[loading_pb2.LoadResponse]:
        last = loading_pb2.LoadResponse(worker=engine.target)
        if self._is_unloading(engine):
            yield loading_pb2.LoadResponse(worker=engine.target, status="being unloaded")
            await asyncio.wait([self._unloads[engine.target]])
        try:
            loading = self._calls.load(engine.target, directory)
            async with contextlib.aclosing(loading):
                async for last in loading:
                    if not last.is_done:
                        yield last
            attaching = loading_pb2.LoadResponse()
            attaching.MergeFrom(last)
            attaching.status, attaching.is_done = "being attached", False
            yield attaching
            await _wait_noticed(engine, lambda: engine.session is not None, "is loaded, not used")
            yield last
        except QuireError as error:
            raise said_by(engine.target, error) from error


def _session_of(engine: Engine) -> Session | None:
    """Return the session of a worker that can unload its model; None: it is not attached."""
    if engine.session is None:
        return None
    if not engine.session.info.can_unload:
        raise UnimplementedError(
            f"worker {engine.target} keeps its model: it is on several devices"
            " (tensor_parallel_size, pipeline_parallel_size), or simulated"
        )
    return engine.session


async def _wait_noticed(engine: Engine, condition: Callable[[], bool], what: str) -> None:
    """Wait until an engine, which keeps trying to attach, notices what its worker has done."""
    left_s = _NOTICE_S
    while not condition():
        started = time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                await engine.wait_until(lambda: condition() or engine.is_settling)
        except TimeoutError:
            raise UnavailableError(f"it {what}: {engine.loss}") from None
        left_s -= time.monotonic() - started
        # Settling has no limit here: each adapter that it loads has its own.
        await engine.wait_until(lambda: condition() or not engine.is_settling)
