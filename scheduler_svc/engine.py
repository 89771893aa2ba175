"""One worker's engine: the only caller of its scheduler core, from attachment to loss and anew.

Others `post` commands; the engine applies them between two steps. It sleeps until there is a
command, a result or a loss, so an idle one costs nothing.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from rpc.errors import InvalidArgumentError, QuireError, TooBusyError, UnavailableError
from scheduler_svc.core.config import SchedulerConfig, SchedulerLoad
from scheduler_svc.core.errors import QueueFullError, RequestRefusedError
from scheduler_svc.core.plan import Finished
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.scheduler import MAX_STEPS_IN_FLIGHT, Scheduler
from scheduler_svc.domain import (
    CancelSequences,
    Command,
    DropSource,
    ModelInfo,
    SubmitRequest,
    WorkerInfo,
)
from scheduler_svc.holding import live_seq_keys, num_live_seqs
from scheduler_svc.metrics import EngineMetrics
from scheduler_svc.placement import WorkerLoad
from scheduler_svc.router_streams import RouterStreams
from scheduler_svc.telemetry import QueueSpans
from scheduler_svc.wire.router import finished_to_proto, news_to_proto
from scheduler_svc.worker_client import TimedResult, WorkerLink

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0

log = structlog.get_logger()

Attach = Callable[[asyncio.Event, int], Awaitable[WorkerLink]]
"""Attaches to the engine's worker; takes `wake` and `step_id_base` of `worker_client.attach`."""


class EngineOwner(Protocol):
    """Who is told of an engine's worker. Called from the engine's task; nothing may wait."""

    def accept(self, engine: "Engine", info: WorkerInfo) -> None:
        """Look at a worker before it is used.

        Raises:
            UnavailableError: It does not fit the others.
        """

    def attached(self, engine: "Engine") -> None:
        """Learn that the engine takes commands."""

    def unavailable(self, engine: "Engine") -> None:
        """Learn that there is a new reason in `engine.loss` why no worker is attached."""

    def lost(self, engine: "Engine", requests: tuple[Request, ...]) -> None:
        """Take back every live request of the engine, which takes no commands until `attached`."""

    def progressed(self) -> None:
        """Learn that sequences have ended, or will not begin."""


@dataclass(slots=True)
class _Session:
    """One attachment: a link, and the core that plans for it."""

    link: WorkerLink
    core: Scheduler


class Engine:
    """Keeps one worker busy, two steps ahead."""

    def __init__(
        self,
        target: str,
        *,
        attach: Attach,
        configure: Callable[[WorkerInfo], SchedulerConfig],
        owner: EngineOwner,
        streams: RouterStreams,
        spans: QueueSpans,
        metrics: EngineMetrics,
    ) -> None:
        self.target = target
        self.loss: str | None = "not attached yet"
        """Why no worker is attached; None: one is."""
        self._attach = attach
        self._configure = configure
        self._owner = owner
        self._streams = streams
        self._spans = spans
        self._metrics = metrics
        self._session: _Session | None = None
        self._commands: deque[Command] = deque()
        self._num_posted_seqs = 0
        self._wake = asyncio.Event()
        self._last_step_id = 0
        self._made_progress = False

    # --- for others -----------------------------------------------------------------------------

    @property
    def is_attached(self) -> bool:
        """Whether the engine takes commands."""
        return self._session is not None

    def post(self, command: Command) -> None:
        """Have a command applied, in order, before the next step. The engine must be attached."""
        assert self._session is not None
        if isinstance(command, SubmitRequest):
            self._num_posted_seqs += num_live_seqs(command.request)
        self._commands.append(command)
        self._wake.set()

    def load(self) -> SchedulerLoad | None:
        """Snapshot the core; None: not attached."""
        return self._session.core.load() if self._session is not None else None

    def placement_load(self) -> WorkerLoad:
        """Say how busy the worker is, commands that are not applied yet included."""
        assert self._session is not None
        load = self._session.core.load()
        return WorkerLoad(
            num_running=load.num_running,
            num_waiting=load.num_waiting + self._num_posted_seqs,
            max_waiting=self._session.core.config.max_waiting,
        )

    def model(self) -> ModelInfo | None:
        """Return the worker's model, its length as the block pool allows; None: not attached."""
        if self._session is None:
            return None
        model = self._session.link.info.model
        return ModelInfo(
            id=model.id,
            max_model_len=self._session.core.max_request_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        )

    def oldest_step_age_s(self) -> float:
        """Say how long the oldest step has been in flight; 0 if none is."""
        return self._session.link.oldest_step_age_s() if self._session is not None else 0.0

    # --- the engine's task ----------------------------------------------------------------------

    async def run(self) -> None:
        """Attach, schedule, and attach again after a loss, until cancelled.

        Raises:
            StaleEpochError: A newer scheduler has the worker; this one must exit.
            BrokenInvariantError: A bug; going on could corrupt an output.
        """
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                await self._run_session()
            except UnavailableError as error:
                # A worker that is lost before it has done a step may be lost again at once.
                backoff_s = _FIRST_BACKOFF_S if self._made_progress else backoff_s
                if self.loss != str(error):
                    log.warning("worker is not available", worker=self.target, reason=str(error))
                    self.loss = str(error)
                    self._owner.unavailable(self)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _run_session(self) -> None:
        """Attach and work until the worker is lost."""
        self._made_progress = False
        link = await self._attach(self._wake, self._last_step_id)
        try:
            self._owner.accept(self, link.info)
            session = _Session(link, Scheduler(self._configure(link.info)))
            self._begin(session)
            try:
                await self._work(session)
            except UnavailableError as error:
                self._end(session, error)
                raise
        finally:
            await link.close()

    def _begin(self, session: _Session) -> None:
        info = session.link.info
        log.info(
            "worker attached",
            worker=self.target,
            worker_id=info.worker_id,
            device=info.device,
            model=info.model.id,
            num_blocks=info.num_blocks,
            max_request_len=session.core.max_request_len,
        )
        self._session = session
        self.loss = None
        self._owner.attached(self)

    async def _work(self, session: _Session) -> None:
        while True:
            self._apply_commands(session)
            for result in session.link.take_results():
                self._apply_result(session, result)
            if session.link.lost is not None:
                raise session.link.lost
            self._send_steps(session)
            await self._wake.wait()
            self._wake.clear()

    def _end(self, session: _Session, why: UnavailableError) -> None:
        """Give everything back. What was posted before the loss still counts."""
        log.warning("worker lost", worker=self.target, reason=str(why))
        self._apply_commands(session)
        self._last_step_id += session.core.load().num_steps
        self._session = None
        self.loss = str(why)
        self._owner.lost(self, session.core.drain())

    def _send_steps(self, session: _Session) -> None:
        while session.core.num_steps_in_flight < MAX_STEPS_IN_FLIGHT:
            started = time.perf_counter()
            plan = session.core.schedule(time.monotonic())
            if plan is None:
                return
            session.link.send(plan)
            self._metrics.schedule.observe(time.perf_counter() - started)

    def _apply_result(self, session: _Session, timed: TimedResult) -> None:
        result = timed.result
        started = time.perf_counter()
        news = session.core.update(result.outcome)
        step_id = self._last_step_id + result.outcome.step_id
        self._streams.deliver(news_to_proto(step_id, news, result.logprobs))
        self._metrics.update.observe(time.perf_counter() - started)
        self._made_progress = True
        self._metrics.step_rpc.observe(timed.rpc_s)
        self._metrics.step_execute.observe(result.execute_s)
        for admitted in news.admitted:
            self._metrics.queue_time.observe(admitted.queue_s)
            self._spans.admitted(admitted)
        self._tell_finished(news.finished)

    def _apply_commands(self, session: _Session) -> None:
        self._num_posted_seqs = 0
        while self._commands:
            match self._commands.popleft():
                case SubmitRequest() as command:
                    self._submit(session.core, command)
                case CancelSequences(source, seq_keys):
                    finished = session.core.cancel(source, seq_keys)
                    self._streams.deliver(finished_to_proto(finished))
                    self._tell_finished(finished)
                case DropSource(source):
                    session.core.cancel_source(source)
                    self._owner.progressed()

    def _submit(self, core: Scheduler, command: SubmitRequest) -> None:
        request = command.request
        try:
            core.submit(request, time.monotonic())
        except RequestRefusedError as error:
            if command.was_accepted:
                # Its worker is lost, and this one has less room.
                finished = tuple(
                    Finished(request.source, key, FinishReason.ERROR, error=str(error))
                    for key in live_seq_keys(request)
                )
                self._streams.deliver(finished_to_proto(finished))
                self._tell_finished(finished)
            else:
                self._streams.refuse(request, _refusal_from_core(error))
                self._owner.progressed()
        else:
            self._spans.submitted(request)

    def _tell_finished(self, finished: tuple[Finished, ...]) -> None:
        for item in finished:
            self._spans.finished(item)
        if finished:
            self._owner.progressed()


def _refusal_from_core(error: RequestRefusedError) -> QuireError:
    if isinstance(error, QueueFullError):
        return TooBusyError(str(error))
    return InvalidArgumentError("request", f"cannot be served: {error}")
