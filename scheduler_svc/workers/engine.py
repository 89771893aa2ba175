"""One worker's engine: attaches it, keeps a session going, and attaches it anew after a loss."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Protocol

import structlog

from contract.errors import UnavailableError
from contract.info import WorkerInfo
from scheduler_svc.core.handover.takeover import Successor
from scheduler_svc.domain import SubmitRequest
from scheduler_svc.observers.metrics import EngineMetrics
from scheduler_svc.observers.spans import SequenceSpans
from scheduler_svc.pacing.pacer import Pace
from scheduler_svc.routers.fan_out import RouterStreams
from scheduler_svc.workers.attach import WorkerUnloadedError
from scheduler_svc.workers.session import Session
from scheduler_svc.workers.stream import WorkerLink

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 0.5

log = structlog.get_logger()

Attach = Callable[[asyncio.Event, int], Awaitable[WorkerLink]]
"""Attaches to the engine's worker; takes `wake` and `step_id_base` of `worker_attach.attach`."""

OpenCore = Callable[[WorkerInfo], AbstractContextManager[Successor]]
"""Makes the core for a worker, which plans for it until the `with` ends."""


class EngineOwner(Protocol):
    """Who is told of an engine's worker. Called from the engine's task; only `settle` may wait."""

    def accept(self, engine: "Engine", info: WorkerInfo) -> None:
        """Look at a worker before it is used.

        Raises:
            UnavailableError: It does not fit the others.
        """

    async def settle(self, engine: "Engine", link: WorkerLink) -> None:
        """Have the worker hold what the others do, before it is used.

        When it returns, the engine has a session before anybody else has a turn.

        Raises:
            UnavailableError: It does not.
        """

    def attached(self, engine: "Engine") -> None:
        """Learn that the engine has a session, which takes commands."""

    def draining(self, engine: "Engine") -> None:
        """Learn that the engine's worker is about to end; `Session.let_go` lets it."""

    def unavailable(self, engine: "Engine") -> None:
        """Learn that `engine.loss` has changed."""

    def lost(self, engine: "Engine", commands: tuple[SubmitRequest, ...]) -> None:
        """Take back every live request of a session that has ended."""


class Engine:
    """Keeps one worker busy for as long as it is there, and looks for it when it is not."""

    def __init__(
        self,
        target: str,
        *,
        attach: Attach,
        open_core: OpenCore,
        owner: EngineOwner,
        streams: RouterStreams,
        spans: SequenceSpans,
        metrics: EngineMetrics,
        pace: Pace,
    ) -> None:
        self.target = target
        self.session: Session | None = None
        """What takes commands; None: no worker is attached."""
        self.loss: str | None = "not attached yet"
        """Why no worker is attached; None: one is."""
        self.is_unloaded = False
        """Whether that is because its model is unloaded, or on its way back."""
        self.was_unloaded = False
        """Whether it has been since it was attached last: it may come with another model."""
        self.is_settling = False
        """Whether its worker is there, and comes to hold what the others do: that may take long."""
        self.lost_at_s: float | None = None
        """When its session ended, of the monotonic clock; None: it has one, or had none yet."""
        self._news = asyncio.Event()
        self._attach = attach
        self._open_core = open_core
        self._owner = owner
        self._streams = streams
        self._spans = spans
        self._metrics = metrics
        self._pace = pace
        self._last_step_id = 0

    async def run(self) -> None:
        """Attach, work, and attach again after a loss, until cancelled.

        Raises:
            StaleEpochError: A newer scheduler has the worker; this one must exit.
            BrokenInvariantError: A bug; going on could corrupt an output.
        """
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                has_progressed = await self._attach_and_work()
            except UnavailableError as error:
                has_progressed = False
                self._note_loss(error)
                self._news.set()
            # A worker that is lost before it has done a step may be lost again at once.
            backoff_s = _FIRST_BACKOFF_S if has_progressed else backoff_s
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is true of the engine; looked at at each step of attaching."""
        while not condition():
            self._news.clear()
            await self._news.wait()

    async def _attach_and_work(self) -> bool:
        """Attach the worker, and work until it is lost.

        Returns:
            Whether it has done a step.

        Raises:
            UnavailableError: It cannot be attached.
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
        self._news.set()
        try:
            await self._owner.settle(self, link)
        finally:
            self.is_settling = False
            self._news.set()

    async def _work(self, link: WorkerLink, core: Successor, wake: asyncio.Event) -> bool:
        session = Session(
            link,
            core,
            wake=wake,
            streams=self._streams,
            spans=self._spans,
            metrics=self._metrics,
            pace=self._pace,
        )
        self._begin(session, link.info, len(core.unclaimed))
        told = asyncio.create_task(self._tell_draining(session))
        try:
            await session.work()
        except UnavailableError as error:
            self._end(session, error)
        finally:
            told.cancel()
        return session.has_progressed

    async def _tell_draining(self, session: Session) -> None:
        await session.wait_draining()
        self._owner.draining(self)

    def _begin(self, session: Session, info: WorkerInfo, num_held_rows: int) -> None:
        log.info(
            "worker attached",
            worker=self.target,
            worker_id=info.worker_id,
            device=info.device,
            model=info.model_id,
            num_blocks=info.limits.num_blocks,
            num_held_rows=num_held_rows,
        )
        self.session = session
        self.loss = None
        self.was_unloaded = False
        self.lost_at_s = None
        self._news.set()
        self._owner.attached(self)

    def _end(self, session: Session, why: UnavailableError) -> None:
        commands = session.end()
        self._last_step_id += session.load().num_steps
        self.session = None
        self.lost_at_s = time.monotonic()
        self._note_loss(why)
        self._owner.lost(self, commands)

    def _note_loss(self, why: UnavailableError) -> None:
        """Say, once, why there is no worker."""
        if self.loss != str(why):
            self.loss = str(why)
            log.warning("worker is not available", worker=self.target, reason=self.loss)
            self._owner.unavailable(self)
