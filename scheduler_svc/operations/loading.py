"""Operators' calls that the scheduler forwards to workers: unload, load and drain.

Before a worker unloads its model, the scheduler empties the worker, so that no request is lost.
First, the worker gets no new requests, and its live requests move, with their KV, to other workers.
Then the scheduler sends the worker no more steps. A request that could not move continues as after
the loss of a worker: other workers compute its tokens again. If no other worker is attached, the
request waits for one.
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
from scheduler_svc.workers.link import ADAPTER_TIMEOUT_S
from scheduler_svc.workers.roster import Roster, ask_all, said_by
from scheduler_svc.workers.session import Session

_UNLOAD_TIMEOUT_S = ADAPTER_TIMEOUT_S + 60.0
"""The timeout of `Unload`. If a worker is loading an adapter, it finishes the adapter before it
unloads the model, and the adapter may take `ADAPTER_TIMEOUT_S`. With a shorter timeout, the call
could fail although the worker unloads its model afterwards."""
_NOTICE_S = 15.0
"""How long an engine may take to notice that its worker has loaded or unloaded its model, not
counting the time in which the worker loads adapters (`Engine.is_settling`)."""

log = structlog.get_logger()


class WorkerCalls:
    """Calls the services that workers have for operators.

    If the worker answers with an error, the call raises it as a QuireError. Each call opens a
    channel of its own, because the channel of the worker's session is closed when the model is
    unloaded.
    """

    def __init__(self, epoch: int, tls: ClientTls | None) -> None:
        self._epoch = epoch
        self._tls = tls

    async def unload(self, target: str) -> bool:
        """Unload a worker's model, and wait until the model is unloaded.

        Returns:
            Whether the model was already unloaded before the call.
        """
        request = loading_pb2.UnloadRequest(epoch=self._epoch)
        async with open_channel(target, tls=self._tls) as channel:
            stub = loading_pb2_grpc.LoadingServiceStub(channel)  # type: ignore[no-untyped-call]
            with calling():
                answer = await stub.Unload(request, timeout=_UNLOAD_TIMEOUT_S)
        return all(each.was_unloaded for each in answer.workers)

    async def load(self, target: str, directory: str) -> AsyncGenerator[loading_pb2.LoadResponse]:
        """Load a model at a worker; yield the progress until the model is loaded."""
        request = loading_pb2.LoadRequest(directory=directory, epoch=self._epoch)
        async with open_channel(target, tls=self._tls) as channel:
            stub = loading_pb2_grpc.LoadingServiceStub(channel)  # type: ignore[no-untyped-call]
            async with contextlib.aclosing(responses(stub.Load(request))) as loading:
                async for progress in loading:
                    progress.worker = target  # the worker sets its name
                    yield progress

    async def drain(self, target: str) -> AsyncIterator[int]:
        """Drain a worker; until it has drained, yield how many of its sequences are still live."""
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
                if not has_begun:  # if it has begun, the worker has drained and ended
                    raise


class Loading:
    """Loads and unloads the models of workers, with one call at a time for each worker."""

    def __init__(
        self,
        roster: Roster,
        drainer: Drainer,
        calls: WorkerCalls,
        *,
        on_stay: Callable[[], None],
    ) -> None:
        """`on_stay` is called after a failed unload, when the worker accepts requests again."""
        self._roster = roster
        self._drainer = drainer
        self._calls = calls
        self._on_stay = on_stay
        self._unloads: dict[str, asyncio.Task[bool]] = {}

    async def unload(self, worker: str) -> Mapping[str, bool]:
        """Unload the model of `worker`, or of all workers if `worker` is empty.

        The workers unload even if the caller is cancelled. If one worker fails, the others still
        unload, and then the error is raised.

        Returns:
            For each worker, whether its model was already unloaded before this call.

        Raises:
            NotFoundError: There is no such worker.
            UnimplementedError: A worker cannot unload its model; no model was unloaded.
            FailedPreconditionError: A worker is loading its model.
            UnavailableError: A worker cannot be reached, or is lost before its model is unloaded.
            QuireError: A worker reported another error.
        """
        engines = self._roster.chosen(worker)
        sessions = {
            engine: _session_of(engine) for engine in engines if not self._is_unloading(engine)
        }
        for session in sessions.values():
            if session is not None:
                # First for all workers, so that no request moves to one that will be unloaded.
                session.leave()
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
        """Load the model of `worker`, or of all workers if `worker` is empty; yield the progress.

        The workers load even if the caller is cancelled. When a worker has loaded its model and is
        attached, its last message has `is_done` set. If a worker is unloading its model, it loads
        after it has finished unloading.

        Raises:
            NotFoundError: There is no such worker.
            UnavailableError: A worker is not attached when the call begins, or is lost before its
                model is loaded. A worker whose model was unloaded need not be attached.
            QuireError: A worker reported another error. If one worker fails, the others still load,
                and then the error is raised.
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
        """Call the `AdminService.Drain` of a worker; yield how many of its sequences are live.

        Raises:
            NotFoundError: There is no such worker.
            QuireError: The worker refuses the call or cannot be reached.
        """
        return self._calls.drain(self._roster.engine(worker).target)

    def stop(self) -> None:
        """Cancel the unloads in progress; called when the sessions end."""
        for task in self._unloads.values():
            task.cancel()

    def _is_unloading(self, engine: Engine) -> bool:
        task = self._unloads.get(engine.target)
        return task is not None and not task.done()

    async def _unload(self, engine: Engine, session: Session | None) -> bool:
        """Empty a worker and unload its model; return whether the model was already unloaded."""
        log.info("unloading a worker's model", worker=engine.target)
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
            log.warning(
                "a worker's model was not unloaded", worker=engine.target, reason=str(error)
            )
            raise
        await _wait_noticed(engine, lambda: engine.is_unloaded, "is unloaded, not attached")
        log.info("a worker's model was unloaded", worker=engine.target)
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
    """Return a worker's session; None if the worker is not attached.

    Raises:
        UnimplementedError: The worker cannot unload its model.
    """
    if engine.session is None:
        return None
    if not engine.session.info.can_unload:
        raise UnimplementedError(
            f"worker {engine.target} keeps its model: it is on several devices"
            " (tensor_parallel_size, pipeline_parallel_size), or simulated"
        )
    return engine.session


async def _wait_noticed(engine: Engine, condition: Callable[[], bool], what: str) -> None:
    """Wait until an engine has noticed that its worker has loaded or unloaded its model.

    Args:
        engine: The engine.
        condition: Returns whether the engine has noticed the change.
        what: What the error message says of the worker, such as "is loaded, not used".

    Raises:
        UnavailableError: The engine has not noticed the change in time.
    """
    left_s = _NOTICE_S
    while not condition():
        started = time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                await engine.wait_until(lambda: condition() or engine.is_settling)
        except TimeoutError:
            raise UnavailableError(f"it {what}: {engine.loss}") from None
        left_s -= time.monotonic() - started
        # Settling has no limit here, because each adapter that is loaded has its own timeout.
        await engine.wait_until(lambda: condition() or not engine.is_settling)
