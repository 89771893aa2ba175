"""A session: one attachment of a worker, and the loop that plans the worker's steps with a core.

Other modules `post` commands, which the session applies to the core between two steps. The session
sleeps until there is a command, a result or a loss, or until a step is due; an idle session costs
nothing.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

from contract.errors import UnavailableError
from contract.hashing import BlockHash
from contract.info import MemoryLevel, ModelInfo, Role, WorkerInfo
from contract.lora import LoadedAdapter, LoraAdapter
from rpc.observe import timeline
from scheduler_svc.core.compact.fragmentation import SpaceReport
from scheduler_svc.core.handover.takeover import REUNION_S
from scheduler_svc.core.interface.config import SchedulerLoad
from scheduler_svc.core.interface.errors import BrokenInvariantError
from scheduler_svc.core.interface.events import Admitted
from scheduler_svc.core.interface.request import Request
from scheduler_svc.core.pacing import Pace
from scheduler_svc.core.reports.load import (
    count_queued,
    num_steps_answered,
    num_steps_sent,
    read_prompts,
    read_queues,
    read_space,
)
from scheduler_svc.core.reports.progress import read_progress
from scheduler_svc.core.scheduler import MAX_STEPS_IN_FLIGHT, Scheduler
from scheduler_svc.domain import Command, SubmitRequest
from scheduler_svc.observers.metrics import EngineMetrics
from scheduler_svc.observers.shortage_log import SpaceWatch, log_memory_level
from scheduler_svc.observers.spans import SequenceSpans, WorkerSpans
from scheduler_svc.observers.step_log import StepLog
from scheduler_svc.observers.steps import AnsweredStep, PacingObserver, SentStep, StepObserver
from scheduler_svc.routers.fan_out import RouterStreams
from scheduler_svc.wire.beam import with_candidates
from scheduler_svc.wire.router import vectors_of
from scheduler_svc.workers.commands import PostedCommands
from scheduler_svc.workers.crash_counter import CrashCounter
from scheduler_svc.workers.link import TimedResult, WorkerLink
from scheduler_svc.workers.placement import WorkerLoad
from scheduler_svc.workers.request_events import RequestEvents

_TICK_S = 0.001
"""The resolution of the event loop's clock; a shorter wait is not worth a timer."""

_T = TypeVar("_T")

Condition: TypeAlias = Callable[[Scheduler], bool]
"""A condition on a core; the function must change nothing."""


class Session:
    """A worker's link, the core that plans for it, and the observers of its steps."""

    def __init__(
        self,
        link: WorkerLink,
        core: Scheduler,
        wake: asyncio.Event,
        *,
        streams: RouterStreams,
        spans: SequenceSpans,
        metrics: EngineMetrics,
        pace: Pace,
        on_admitted: Callable[["Session", Admitted], None] = lambda *_: None,
    ) -> None:
        """`wake` must be the event that `link` sets; `on_admitted` must not call the session."""
        self.link = link
        self.step_log = StepLog()
        self.crashes = CrashCounter()
        self.paces_prompts = True
        """Whether `pace` limits the time that prompts may add to a step with decodes. The limit is
        off while sequences move to other workers to decode, because prompts then delay hardly any
        decode at this worker."""
        self.has_progressed = False
        """Whether the worker has returned a result."""
        self._core = core
        self._wake = wake
        self._metrics = metrics
        self._on_admitted = on_admitted
        self._pacing = PacingObserver(core.config, pace)
        worker_id, block_bytes = link.info.worker_id, core.config.bytes_per_block
        self._observers: tuple[StepObserver, ...] = (
            self._pacing,
            self.step_log,
            metrics,
            WorkerSpans(spans, worker_id, block_bytes, core.owner),
        )
        self._events = RequestEvents(streams, spans, metrics, self.crashes)
        self._space_watch = SpaceWatch(worker_id)
        self._memory_level = MemoryLevel.OK
        self._commands = PostedCommands(
            core, self._pacing.meter, self._events, self._space_watch, metrics
        )
        self._placement_load: WorkerLoad | None = None
        """The last computed result of `placement_load`; None: the load may have changed since."""
        self._num_expected_seqs = self._num_expected_tokens = 0
        self._is_leaving = self._is_handing_over = self._has_ended = False
        self._settled = asyncio.Event()
        """Set when no step is in flight after `hand_over`, or when the session ends."""
        self._bug: BrokenInvariantError | None = None
        """A bug in the core that `call` has found; `work` raises it, too, to end the session."""
        self._waits: list[tuple[Condition, asyncio.Future[None]]] = []
        self._alarm: asyncio.TimerHandle | None = None
        """Wakes the session when the next step is due."""
        # Wake up to free unclaimed blocks even if nothing else happens.
        if core.takeover.unclaimed:
            for after_s in (REUNION_S, core.config.claim_s):
                # Slightly later, because timers count from the beginning of the event loop's turn.
                asyncio.get_running_loop().call_later(after_s + 0.1, wake.set)

    # --- commands and calls ---------------------------------------------------------------------

    def post(self, command: Command, num_tokens: int = 0) -> None:
        """Queue a command. The session applies all commands in order, before its next step.

        `num_tokens` is an estimate of the tokens to compute for a submitted request.
        """
        if isinstance(command, SubmitRequest):
            self._placement_load = None
        self._commands.post(command, num_tokens)
        self._wake.set()

    def expect(self, num_seqs: int, num_tokens: int) -> None:
        """Include sequences in the load before they are posted; negative numbers take them out.

        The sequences wait until a copy of their prefix has arrived at this worker.
        """
        self._num_expected_seqs += num_seqs
        self._num_expected_tokens += num_tokens
        self._placement_load = None

    def call(self, function: Callable[[Scheduler], _T]) -> _T:
        """Call `function` with the core, between two steps and after all posted commands.

        Raises:
            UnavailableError: The worker is lost.
        """
        self.check_alive()
        self._commands.apply()
        self._placement_load = None
        self._wake.set()
        try:
            return function(self._core)
        except BrokenInvariantError as error:
            self._bug = error
            raise

    def check_alive(self) -> None:
        """Check that the worker is not lost.

        Raises:
            UnavailableError: The worker is lost.
        """
        if self._has_ended:
            raise UnavailableError(f"worker {self.info.worker_id} is lost: {self.link.lost}")

    async def wait_until(self, condition: Condition) -> None:
        """Wait until a condition holds; it is checked between two steps.

        Raises:
            UnavailableError: The worker is lost before the condition holds.
        """
        self.check_alive()
        if not condition(self._core):
            holds = asyncio.get_running_loop().create_future()
            self._waits.append((condition, holds))
            await holds

    async def load_adapter(self, name: str, directory: str) -> LoadedAdapter:
        """Load a LoRA adapter at the worker; see `WorkerLink.load_adapter`."""
        return await self.link.load_adapter(name, directory)

    async def unload_adapter(self, adapter: LoraAdapter) -> None:
        """Unload a LoRA adapter at the worker when the steps in flight have results.

        These steps may use the adapter, and the call that unloads it could overtake them.
        """
        num_sent = num_steps_sent(self._core)
        await self.wait_until(lambda core: num_steps_answered(core) >= num_sent)
        await self.link.unload_adapter(adapter)

    # --- reports --------------------------------------------------------------------------------

    @property
    def info(self) -> WorkerInfo:
        """The worker's description of itself, received when it was attached."""
        return self.link.info

    @property
    def role(self) -> Role:
        """The part of requests that the worker computes: prompts, decodes or both."""
        return self.link.info.role

    def load(self) -> SchedulerLoad:
        """Return a snapshot of the core's load."""
        return self._core.load()

    def space(self) -> SpaceReport:
        """Measure the use of the core's blocks; this takes time in proportion to the blocks."""
        return read_space(self._core)

    def queued_by_tenant(self) -> Counter[str]:
        """Count the sequences that do not run, by tenant."""
        return count_queued(self._core)

    def accounts(self) -> Mapping[str, float]:
        """Return the core's `Policy.accounts`: how much of the service each tenant has used."""
        return self._core.policy.accounts()

    def placement_load(self) -> WorkerLoad:
        """Return how busy the worker is.

        The load includes requests that wait for a copy of their prefix to arrive at this worker.
        """
        if self._placement_load is None:  # cached, because every request asks every worker
            load = self._core.load()
            self._placement_load = WorkerLoad(
                num_running=load.num_running,
                num_waiting=load.num_waiting + self._commands.num_seqs + self._num_expected_seqs,
                max_waiting=self._core.config.max_waiting,
                max_request_len=self._core.max_request_len,
                num_queued_tokens=self._core.num_queued_tokens
                + self._commands.num_tokens
                + self._num_expected_tokens,
                is_memory_short=load.is_memory_short,
            )
        return self._placement_load

    @property
    def block_size(self) -> int:
        """Number of token slots in a block."""
        return self._core.config.block_size

    def num_held_tokens(self, request: Request) -> int:
        """Return for how many tokens the worker holds KV that only this request can use.

        Such KV is left from an earlier scheduler that served the request.
        """
        return self._core.takeover.num_held_tokens(request)

    def num_cached_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """Return the length of the longest prefix of `hashes` that the worker has cached."""
        return self._core.lookup.num_cached_blocks(hashes)

    def model(self) -> ModelInfo:
        """Return the worker's model, with the length limit that the block pool allows."""
        return replace(self.link.info.model, max_model_len=self._core.max_request_len)

    def oldest_step_age_s(self) -> float:
        """Return how long the oldest step has been in flight; 0 if none is."""
        return self.link.oldest_step_age_s()

    def trouble(self) -> str | None:
        """Describe why the worker seems to hang, if it does. A hanging worker may still recover."""
        heartbeat = self.link.heartbeat
        if heartbeat.is_hanging:
            return f"it has been silent for {heartbeat.silent_s:g} s"
        runs_s, limit_s = self.link.oldest_step_runs_s(), self._pacing.pacer.is_late_after_s
        if limit_s is not None and runs_s > limit_s:
            return (
                f"a step has been running for {runs_s:.1f} s; the limit for it is {limit_s:.1f} s"
            )
        return None

    # --- leaving --------------------------------------------------------------------------------

    async def hand_over(self) -> None:
        """Send no more steps; return when all sent steps have results, or the worker is lost."""
        self._is_handing_over = True
        self._wake.set()
        await self._settled.wait()

    @property
    def is_draining(self) -> bool:
        """Whether the worker gets no new requests: it is about to end, or `leave` was called."""
        return self._is_leaving or self.is_ending

    @property
    def is_ending(self) -> bool:
        """Whether the worker has announced its end."""
        return self.link.draining.done()

    def leave(self) -> None:
        """Accept no new requests, because the model is about to be unloaded."""
        self._is_leaving = True

    def stay(self) -> None:
        """Undo `leave` and `hand_over`, because the model stays after all."""
        self._is_leaving = self._is_handing_over = False
        self._settled.clear()
        self._wake.set()

    async def wait_draining(self) -> None:
        """Wait until the worker announces its end."""
        await asyncio.shield(self.link.draining)

    async def let_go(self) -> None:
        """Release the worker once all steps in flight have results."""
        await self.hand_over()
        self.link.let_go()

    # --- for the engine's task ------------------------------------------------------------------

    async def work(self) -> None:
        """Schedule steps, send them and apply their results until the worker is lost.

        The loop never waits for a particular step. Each turn first applies posted commands and
        received results. Then it sends steps, while fewer than `MAX_STEPS_IN_FLIGHT` are in flight
        and the pacer says that the next step is due. Finally it sleeps until `wake` is set.

        Raises:
            UnavailableError: The worker is lost; call `end`.
            BrokenInvariantError: The core has a bug; continuing could corrupt an output.
        """
        while True:
            self._commands.apply()
            for result in self.link.take_results():
                self._apply_result(result)
            self._update_memory_level()
            if self._is_handing_over and not self._core.steps:
                self._settled.set()
            if self._bug is not None:
                raise self._bug
            if self.link.lost is not None:
                raise self.link.lost
            self._send_steps()
            self._resolve_waits()
            self._placement_load = None
            await self._wake.wait()
            self._wake.clear()

    def end(self) -> tuple[SubmitRequest, ...]:
        """End the session, and return commands that continue its live requests at other workers.

        Requests that were posted but have not begun are included. After `end`, nothing may be
        posted.
        """
        self._settled.set()
        if self._alarm is not None:
            self._alarm.cancel()
        self._commands.apply()
        lost = self.link.lost
        self._space_watch.on_lost(lost or UnavailableError("the scheduler gives up the worker"))
        self._has_ended = True
        for _, holds in self._waits:
            if not holds.done():
                holds.set_exception(UnavailableError(f"the worker is lost: {lost}"))
        return tuple(self._resubmit(request) for request in self._core.drain())

    # --- parts of work --------------------------------------------------------------------------

    def _send_steps(self) -> None:
        while not self._is_handing_over and len(self._core.steps) < MAX_STEPS_IN_FLIGHT:
            wait_s = self._pacing.pacer.next_due_s - time.monotonic()
            if wait_s > _TICK_S:
                self._set_alarm(wait_s)
                return
            started = time.perf_counter()
            with timeline.span("schedule"):
                pacer, prompts = self._pacing.pacer, read_prompts(self._core)
                paced = pacer.max_paced_tokens(prompts) if self.paces_prompts else None
                bounds = (paced, pacer.max_prompt_tokens)
                plan = self._core.schedule(time.monotonic(), *bounds)
            if expired := self._core.take_expired():
                self._events.on_ended(expired)
                self._metrics.expired.inc(len(expired))
            self._space_watch.on_reports(self._core.defragmenter.take_reports())
            if plan is None:
                return
            with timeline.span("encode the batch"):
                step_id = self.link.send(plan)
            took_s = time.perf_counter() - started
            sent = SentStep(plan, step_id, read_queues(self._core), took_s)
            for observer in self._observers:
                observer.on_sent(sent)

    def _set_alarm(self, wait_s: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_later(wait_s, self._wake.set)

    def _apply_result(self, timed: TimedResult) -> None:
        result, message = timed.result, timed.message
        started = time.perf_counter()
        if message.prompt_logprobs:  # before the update, in which ended sequences lose their rows
            scores = message.prompt_logprobs
            self._events.publish_prompt_logprobs(timed.step_id, scores, self._core.owner)
        vectors = vectors_of(message.pooled, self._core.owner) if message.pooled else ()
        with timeline.span("update"):
            beam_rows = self._core.beams.rows
            events = self._core.update(with_candidates(result, message.logprobs, beam_rows))
        with timeline.span("publish to the routers"):
            self._events.publish(timed.step_id, events, message.logprobs, vectors)
        update_s = time.perf_counter() - started
        self.has_progressed = True
        execute_s, rpc_s = result.execute_s, timed.rpc_s
        answered = AnsweredStep(timed.step_id, execute_s, rpc_s, update_s, time.time())
        for observer in self._observers:
            observer.on_answered(answered)
        self._events.record(events, update_s)
        for admitted in events.admitted:
            self._on_admitted(self, admitted)

    def _update_memory_level(self) -> None:
        level, before = self.link.memory_level, self._memory_level
        if level is not before:
            self._memory_level = level
            self._core.set_memory_level(level)
            log_memory_level(self.info.worker_id, level, before, self._core.load())

    def _resolve_waits(self) -> None:
        waits, self._waits = self._waits, []
        for condition, holds in waits:
            if holds.done():  # the caller was cancelled
                continue
            if condition(self._core):
                holds.set_result(None)
            else:
                self._waits.append((condition, holds))

    def _resubmit(self, request: Request) -> SubmitRequest:
        """Make the command that continues a request at another worker.

        The request's crash count is removed from `crashes` (a `CrashCounter`), and sent in the
        command.
        """
        if self.is_draining:  # the end of a draining worker does not count as a crash
            num_crashes = self.crashes.take(request)
        else:
            progress = read_progress(self._core, request)
            num_crashes = self.crashes.take_after_loss(request, progress)
        return SubmitRequest(request, was_accepted=True, num_crashes=num_crashes)
