"""The engine of one worker: attaches the worker, runs a session, and reattaches it after a loss."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Protocol

import structlog

from contract.errors import UnavailableError
from contract.info import WorkerInfo
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.domain import SubmitRequest
from scheduler_svc.workers.attach import WorkerUnloadedError
from scheduler_svc.workers.link import WorkerLink
from scheduler_svc.workers.session import Session

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 0.5

log = structlog.get_logger()

Attach = Callable[[asyncio.Event, int], Awaitable[WorkerLink]]
"""Attaches the engine's worker; the arguments are `wake` and `step_id_base` of `attach.attach`."""

MakeSession = Callable[[WorkerLink, Scheduler, asyncio.Event], Session]
"""Creates a session; the last argument is `wake` of `Session`."""

OpenCore = Callable[[WorkerInfo], AbstractContextManager[Scheduler]]
"""Creates a worker's core, which plans the worker's steps until the `with` block ends."""


class EngineOwner(Protocol):
    """Callbacks that an engine calls from its task; only `settle` may wait."""

    def accept(self, engine: "Engine", info: WorkerInfo) -> None:
        """Check a worker before it is used.

        Raises:
            UnavailableError: The worker's model differs from that of the other workers.
        """

    async def settle(self, engine: "Engine", link: WorkerLink) -> None:
        """Make the worker hold the same adapters as the other workers, before it is used.

        When `settle` returns, the engine starts a session before any other task runs, so that no
        adapter is loaded or unloaded in between.

        Raises:
            UnavailableError: The worker cannot hold these adapters.
        """

    def on_attached(self, engine: "Engine") -> None:
        """Called when the engine has a new session, which accepts commands."""

    def on_draining(self, engine: "Engine") -> None:
        """Called when the engine's worker is about to end and waits for `Session.let_go`."""

    def on_unavailable(self, engine: "Engine") -> None:
        """Called when `engine.loss` has changed."""

    def on_lost(self, engine: "Engine", commands: tuple[SubmitRequest, ...]) -> None:
        """Called when a session has ended; `commands` can continue its live requests elsewhere."""


class Engine:
    """Attaches one worker, runs a session with it, and attaches it again after each loss."""

    def __init__(
        self,
        target: str,
        *,
        attach: Attach,
        open_core: OpenCore,
        make_session: MakeSession,
        owner: EngineOwner,
    ) -> None:
        self.target = target
        self.session: Session | None = None
        """The session with the worker; None: the worker is not attached."""
        self.loss: str | None = "not attached yet"
        """Why the worker is not attached; None: it is attached."""
        self.is_unloaded = False
        """Whether the worker is not attached because its model is unloaded or being loaded."""
        self.was_unloaded = False
        """Whether `is_unloaded` was true at any time since the worker was last attached. If so, the
        worker may return with another model."""
        self.is_settling = False
        """Whether the worker is loading the other workers' adapters, which may take long."""
        self.lost_at_s: float | None = None
        """When the last session ended, on the monotonic clock; None: the worker is attached, or
        never was."""
        self._changed = asyncio.Event()
        self._attach = attach
        self._open_core = open_core
        self._make_session = make_session
        self._owner = owner
        self._last_step_id = 0

    async def run(self) -> None:
        """Attach the worker, run a session, and begin again after each loss, until cancelled.

        Raises:
            StaleEpochError: A newer scheduler has the worker; this scheduler must exit.
            BrokenInvariantError: The core has a bug; continuing could corrupt an output.
        """
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                has_progressed = await self._attach_and_work()
            except UnavailableError as error:
                has_progressed = False
                self._publish_loss(error)
                self._changed.set()
            # Wait longer and longer as long as the worker is lost before its first result.
            backoff_s = _FIRST_BACKOFF_S if has_progressed else backoff_s
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds.

        The condition is checked at once, and again when the worker begins or ends to load adapters,
        when the worker is attached, and when an attempt to attach the worker fails.
        """
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def attached_session(self) -> Session:
        """Return the session.

        Raises:
            UnavailableError: The worker is not attached.
        """
        if self.session is None:
            raise UnavailableError(f"worker {self.target} is not attached: {self.loss}")
        return self.session

    async def _attach_and_work(self) -> bool:
        """Attach the worker, and run a session until the worker is lost.

        Returns:
            Whether the worker returned the result of any step before it was lost.

        Raises:
            UnavailableError: The worker cannot be attached.
        """
        wake = asyncio.Event()
        try:
            link = await self._attach(wake, self._last_step_id)
        except UnavailableError as error:
            self.is_unloaded = isinstance(error, WorkerUnloadedError)
            self.was_unloaded |= self.is_unloaded
            raise
        self.is_unloaded = False
        try:
            self._owner.accept(self, link.info)
            await self._settle(link)
            with self._open_core(link.info) as core:
                if link.holdings.is_anything:
                    core.inherit(link.holdings, time.monotonic())
                return await self._work(link, core, wake)
        finally:
            await link.close()

    async def _settle(self, link: WorkerLink) -> None:
        self.is_settling = True
        self._changed.set()
        try:
            await self._owner.settle(self, link)
        finally:
            self.is_settling = False
            self._changed.set()

    async def _work(self, link: WorkerLink, core: Scheduler, wake: asyncio.Event) -> bool:
        session = self._make_session(link, core, wake)
        self._begin(session, link.info, len(core.takeover.unclaimed))
        drain = asyncio.create_task(self._await_drain(session))
        try:
            await session.work()
        except UnavailableError as error:
            self._end(session, error)
        finally:
            drain.cancel()
        return session.has_progressed

    async def _await_drain(self, session: Session) -> None:
        await session.wait_draining()
        self._owner.on_draining(self)

    def _begin(self, session: Session, info: WorkerInfo, num_held_rows: int) -> None:
        log.info(
            "worker attached",
            worker=self.target,
            worker_id=info.worker_id,
            device=info.device,
            model=info.model.id,
            role=info.role,
            num_blocks=info.limits.num_blocks,
            num_held_rows=num_held_rows,
        )
        self.session = session
        self.loss = None
        self.was_unloaded = False
        self.lost_at_s = None
        self._changed.set()
        self._owner.on_attached(self)

    def _end(self, session: Session, why: UnavailableError) -> None:
        commands = session.end()
        self._last_step_id += session.load().num_steps
        self.session = None
        self.lost_at_s = time.monotonic()
        self._publish_loss(why)
        self._owner.on_lost(self, commands)

    def _publish_loss(self, why: UnavailableError) -> None:
        """Log and report why the worker is not attached, unless this reason is `loss` already."""
        if self.loss != str(why):
            self.loss = str(why)
            log.warning("worker is not available", worker=self.target, reason=self.loss)
            self._owner.on_unavailable(self)
