"""One attachment of a worker: the only caller of its scheduler core, a step ahead of the worker.

Others `post` commands, which are applied between two steps. The session sleeps until there is a
command, a result or a loss, or a step is due, so an idle one costs nothing.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from contract.errors import UnavailableError
from contract.hashing import BlockHash
from contract.lora import LoadedAdapter, LoraAdapter
from rpc.observe import timeline
from scheduler_svc.core.compact.fragmentation import SpaceReport
from scheduler_svc.core.config import SchedulerLoad
from scheduler_svc.core.errors import BrokenInvariantError
from scheduler_svc.core.handover.takeover import REUNION_S, Successor
from scheduler_svc.core.reports.load import (
    count_queued,
    num_steps_answered,
    num_steps_sent,
    read_prompts,
    read_queues,
    read_space,
)
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import MAX_STEPS_IN_FLIGHT
from scheduler_svc.domain import Command, ModelInfo, SubmitRequest, WorkerInfo
from scheduler_svc.observers.memory_watch import MemoryWatch
from scheduler_svc.observers.metrics import EngineMetrics
from scheduler_svc.observers.space_watch import SpaceWatch
from scheduler_svc.observers.spans import SequenceSpans, WorkerSpans
from scheduler_svc.observers.step_observer import StepObserver
from scheduler_svc.pacing.pacer import Pace
from scheduler_svc.routers.fan_out import RouterStreams
from scheduler_svc.routers.request_events import RequestNews
from scheduler_svc.wire.worker import with_candidates
from scheduler_svc.workers.commands import PostedCommands
from scheduler_svc.workers.core_waits import Condition, CoreWaits
from scheduler_svc.workers.crash_counter import Losses
from scheduler_svc.workers.placement import WorkerLoad
from scheduler_svc.workers.stream import TimedResult, WorkerLink

_TICK_S = 0.001
"""Of the event loop's clock: less is not worth an alarm."""

_T = TypeVar("_T")


class Session:
    """A worker's link, and the core that plans for it."""

    def __init__(
        self,
        link: WorkerLink,
        core: Successor,
        *,
        wake: asyncio.Event,
        streams: RouterStreams,
        spans: SequenceSpans,
        metrics: EngineMetrics,
        pace: Pace,
    ) -> None:
        """`wake` is the one that `link` sets."""
        self.has_progressed = False
        """Whether the worker has answered a step."""
        self.steps = StepObserver(metrics, core.config, pace)
        """What it has done; for reading."""
        self._link = link
        self._core = core
        self._wake = wake
        self._worker_spans = WorkerSpans(
            spans, link.info.worker_id, core.config.bytes_per_block, core.owner
        )
        self._metrics = metrics
        self._placement_load: WorkerLoad | None = None
        """As of the last time that somebody asked; None: it may have changed."""
        self._space_watch = SpaceWatch(link.info.worker_id)
        self._memory_watch = MemoryWatch(link.info.worker_id, core)
        self._losses = Losses()
        self._news = RequestNews(streams, spans, metrics, self._losses)
        self._commands = PostedCommands(
            core,
            self.steps.meter,
            news=self._news,
            losses=self._losses,
            space_watch=self._space_watch,
            metrics=metrics,
        )
        self._is_leaving = self._is_handing_over = self._has_ended = False
        self._settled = asyncio.Event()
        self._bug: BrokenInvariantError | None = None
        """What a call from outside the engine's task has found."""
        self._waits = CoreWaits()
        self._alarm: asyncio.TimerHandle | None = None
        """Wakes the session when the next step is due."""
        if core.unclaimed:  # what nobody claims is freed, even if nothing else happens
            for after_s in (REUNION_S, core.config.claim_s):
                # Some more, since a loop's timer counts from when its turn began.
                asyncio.get_running_loop().call_later(after_s + 0.1, wake.set)

    # --- for others -----------------------------------------------------------------------------

    def post(self, command: Command, num_tokens: int = 0) -> None:
        """Have a command applied before the next step; commands apply in the order posted.

        `num_tokens` says how many tokens there are to compute for it, as far as is known.
        """
        if isinstance(command, SubmitRequest):
            self._placement_load = None
        self._commands.post(command, num_tokens)
        self._wake.set()

    def call(self, function: Callable[[Successor], _T]) -> _T:
        """Call the core between two steps, after the commands posted before.

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
        """Check that the session goes on.

        Raises:
            UnavailableError: The worker is lost.
        """
        if self._has_ended:
            raise UnavailableError(f"worker {self.info.worker_id} is lost: {self._link.lost}")

    async def until(self, condition: Condition) -> None:
        """Wait until something is true of the core; looked at between two steps.

        Raises:
            UnavailableError: The worker is lost before that.
        """
        self.check_alive()
        if not condition(self._core):
            await self._waits.wait(condition)

    async def resize_pool(self, num_blocks: int) -> None:
        """See `WorkerLink`."""
        await self._link.resize_pool(num_blocks)

    async def load_adapter(self, name: str, directory: str) -> LoadedAdapter:
        """See `WorkerLink`."""
        return await self._link.load_adapter(name, directory)

    async def unload_adapter(self, adapter: LoraAdapter) -> None:
        """See `WorkerLink`; not before the steps sent so far are answered, which may name it.

        Batches and calls are on streams of their own, and one may overtake the other.
        """
        num_sent = num_steps_sent(self._core)
        await self.until(lambda core: num_steps_answered(core) >= num_sent)
        await self._link.unload_adapter(adapter)

    async def pull_kv(
        self,
        source_target: str,
        source_instance_id: int,
        sources: Sequence[int],
        targets: Sequence[int],
    ) -> None:
        """See `WorkerLink`."""
        await self._link.pull_kv(source_target, source_instance_id, sources, targets)

    @property
    def info(self) -> WorkerInfo:
        """The worker, as it describes itself."""
        return self._link.info

    def load(self) -> SchedulerLoad:
        """Snapshot the core."""
        return self._core.load()

    def space(self) -> SpaceReport:
        """Look at the core's blocks, which takes time in proportion to them."""
        return read_space(self._core)

    def queued_by_tenant(self) -> Counter[str]:
        """Count the sequences that wait; see `count_queued`."""
        return count_queued(self._core)

    def placement_load(self) -> WorkerLoad:
        """Say how busy the worker is, commands that are not applied yet included."""
        if self._placement_load is None:  # every worker is asked for every request
            load = self._core.load()
            self._placement_load = WorkerLoad(
                num_running=load.num_running,
                num_waiting=load.num_waiting + self._commands.num_seqs,
                max_waiting=self._core.config.max_waiting,
                max_request_len=self._core.max_request_len,
                num_queued_tokens=self._core.num_queued_tokens + self._commands.num_tokens,
                is_memory_short=load.is_memory_short,
            )
        return self._placement_load

    @property
    def block_size(self) -> int:
        """Token slots of a block."""
        return self._core.config.block_size

    def num_held_tokens(self, request: Request) -> int:
        """Say how many tokens' KV of a request the worker has from before, for nobody else."""
        return self._core.num_held_tokens(request)

    def num_cached_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """Say how many blocks of a prompt the prefix cache has."""
        return self._core.num_cached_blocks(hashes)

    def model(self) -> ModelInfo:
        """Return the worker's model, its length as the block pool allows."""
        return replace(self._link.info.model, max_model_len=self._core.max_request_len)

    def oldest_step_age_s(self) -> float:
        """Say how long the oldest step has been in flight; 0 if none is."""
        return self._link.oldest_step_age_s()

    def trouble(self) -> str | None:
        """Say in what way the worker hangs, if it seems to; it may yet go on."""
        silence = self._link.silence
        if silence.is_hang:
            return f"it has said nothing for {silence.seconds:g} s"
        runs_s, limit_s = self._link.oldest_step_runs_s(), self.steps.pacer.is_late_after_s
        if limit_s is not None and runs_s > limit_s:
            return f"a step takes {runs_s:.1f} s so far; {limit_s:.1f} s would be very long for it"
        return None

    async def hand_over(self) -> None:
        """Send no more steps; return when those in flight are answered, or the worker is lost."""
        self._is_handing_over = True
        self._wake.set()
        await self._settled.wait()

    @property
    def is_draining(self) -> bool:
        """Whether the worker, or its model, is about to go: nothing new is for it."""
        return self._is_leaving or self.is_ending

    @property
    def is_ending(self) -> bool:
        """Whether the worker says that it is about to end."""
        return self._link.draining.done()

    def leave(self) -> None:
        """Let nothing new come here: the model is about to go."""
        self._is_leaving = True

    def stay(self) -> None:
        """Go on as before `leave`, and `hand_over`: the model stays."""
        self._is_leaving = self._is_handing_over = False
        self._settled.clear()
        self._wake.set()

    async def wait_draining(self) -> None:
        """Return when the worker says that it is about to end."""
        await asyncio.shield(self._link.draining)

    async def let_go(self) -> None:
        """Lose the worker in good order: when the steps in flight are answered."""
        await self.hand_over()
        self._link.let_go()

    def note_losses(self, request: Request, num_losses: int) -> None:
        """Note how many workers in a row were lost with a live request."""
        self._losses.note(request, num_losses)

    def take_losses(self, request: Request) -> int:
        """Return what was noted of a request, and forget it."""
        return self._losses.take(request)

    # --- for the engine's task ------------------------------------------------------------------

    async def work(self) -> None:
        """Schedule, send, take results, until the worker is lost.

        Raises:
            UnavailableError: It is lost; `end` is what remains to be done.
            BrokenInvariantError: A bug; going on could corrupt an output.
        """
        while True:
            self._commands.apply()
            for result in self._link.take_results():
                self._apply_result(result)
            self._memory_watch.hear(self._link.memory_level)
            if self._is_handing_over and not self._core.num_steps_in_flight:
                self._settled.set()
            if self._bug is not None:
                raise self._bug
            if self._link.lost is not None:
                raise self._link.lost
            self._send_steps()
            self._waits.look(self._core)
            self._placement_load = None
            await self._wake.wait()
            self._wake.clear()

    def end(self) -> tuple[SubmitRequest, ...]:
        """Return every live request. What was posted before counts; nothing may be posted after."""
        self._settled.set()
        if self._alarm is not None:
            self._alarm.cancel()
        self._commands.apply()
        lost = self._link.lost
        self._space_watch.end(lost or UnavailableError("the scheduler gives up the worker"))
        self._has_ended = True
        self._waits.lost(UnavailableError(f"it is lost: {lost}"))
        return tuple(self._lose(request) for request in self._core.drain())

    # --- parts of work --------------------------------------------------------------------------

    def _send_steps(self) -> None:
        while not self._is_handing_over and self._core.num_steps_in_flight < MAX_STEPS_IN_FLIGHT:
            wait_s = self.steps.pacer.next_due_s - time.monotonic()
            if wait_s > _TICK_S:
                self._set_alarm(wait_s)
                return
            started = time.perf_counter()
            with timeline.span("schedule"):
                pacer, prompts = self.steps.pacer, read_prompts(self._core)
                bounds = (pacer.max_paced_tokens(prompts), pacer.max_prompt_tokens)
                plan = self._core.schedule(time.monotonic(), *bounds)
            if expired := self._core.take_expired():
                self._news.ended(expired)
                self._metrics.expired.inc(len(expired))
            self._space_watch.hear(self._core.take_reports())
            if plan is None:
                return
            with timeline.span("encode the batch"):
                step_id = self._link.send(plan)
            self._losses.sent(plan)
            took_s = self.steps.sent(plan, read_queues(self._core), started)
            self._worker_spans.sent(plan, step_id, took_s)

    def _set_alarm(self, wait_s: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_later(wait_s, self._wake.set)

    def _apply_result(self, timed: TimedResult) -> None:
        result = timed.result
        started = time.perf_counter()
        self._worker_spans.answered(timed.step_id)
        if result.prompt_logprobs:  # now: what the update ends has no row any more
            self._news.scored(timed.step_id, result.prompt_logprobs, self._core.owner)
        with timeline.span("update"):
            news = self._core.update(with_candidates(result, self._core.beam_rows))
        with timeline.span("tell the routers"):
            self._news.told(timed.step_id, news, result.logprobs)
        took_s = time.perf_counter() - started
        self.has_progressed = True
        self.steps.answered(timed, took_s)
        self._news.noted(news, took_s)

    def _lose(self, request: Request) -> SubmitRequest:
        """Say that a request was live when the worker was lost, and whether it ran in vain."""
        # Of one that drains it is nobody's fault.
        take = self._losses.take if self.is_draining else self._losses.take_after_loss
        return SubmitRequest(request, was_accepted=True, num_losses=take(request))
