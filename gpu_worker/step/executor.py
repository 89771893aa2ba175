"""Executes steps on one device: applies row changes, moves blocks, runs the model, returns results.

A step is launched, then collected. On CUDA, without drafts, two steps may be launched before the
first of them is collected. Launching then never waits for the device, and a decode's input token
goes from the sampler to the next step without leaving the device. On a CPU a step is done when
`launch` returns. One thread makes all calls.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from contract.arrays import BoolArray, Int32Array
from contract.errors import FailedPreconditionError
from contract.state import Holdings
from contract.step import Plan, PooledRow, Result, StepId, StepLogprob
from contract.worker_limits import Limits
from gpu_worker import metrics
from gpu_worker.kv.disk_pool import DiskPool
from gpu_worker.kv.host_pool import HostPool
from gpu_worker.lora.adapter import Adapter
from gpu_worker.lora.slots import AdapterSlots
from gpu_worker.lora.step_adapters import NO_ADAPTERS, AdapterTable
from gpu_worker.memory.elastic import OutOfMemoryError, VirtualMemoryError
from gpu_worker.models.attention import Decoder
from gpu_worker.ranks.collectives import Ranks
from gpu_worker.sampling.grammar_masks import RowGrammars
from gpu_worker.sampling.sampled_tokens import NOTHING_SAMPLED, Readback, merged
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.sampling.shared_sampling import Sampling, share_sampling
from gpu_worker.speculative.drafter import Drafter
from gpu_worker.speculative.verify import Speculation
from gpu_worker.step.block_labels import BlockLabels
from gpu_worker.step.block_moves import BlockMoves, Pool
from gpu_worker.step.graphs.cuda_graphs import GraphBackend
from gpu_worker.step.model_runner import ModelRunner
from gpu_worker.step.prompt_logprobs import PromptScoresReadback
from gpu_worker.step.rows import Rows, ScheduledRows
from gpu_worker.step.spans import SequenceSpans
from gpu_worker.step.timing import BusyClock, head_start_s
from rpc.observe import timeline


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedStep:
    """A launched step that has not been collected."""

    step_id: StepId
    scheduled: ScheduledRows
    readback: Readback | None
    """None if no row samples."""
    prompt_scores: tuple[PromptScoresReadback, ...]
    """Empty if no prompt is scored."""
    failed_swap_in_block_ids: Int32Array
    start_s: float
    disk_pool: DiskPool | None = None
    """The disk tier, if the step computes nothing and only moves blocks; None if the step computes,
    or if there is no disk tier."""

    @property
    def is_idle(self) -> bool:
        """Whether the step computes nothing and there is a disk tier.

        `collect` never waits for such a step: the result reports the disk moves that have ended.
        """
        return self.disk_pool is not None

    def is_done(self) -> bool:
        """Whether `collect` would return at once."""
        if self.disk_pool is not None:
            is_waiting = self.disk_pool.is_busy(self.step_id)
            return not is_waiting or self.disk_pool.has_ended_moves(self.step_id)
        if self.readback is not None and not self.readback.is_done():
            return False
        return all(scores.is_done() for scores in self.prompt_scores)


class Executor:
    """Owns the rows and runs the model."""

    def __init__(
        self,
        model: Decoder,
        pool: Pool,
        limits: Limits,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        spans: SequenceSpans | None = None,
        host_pool: HostPool | None = None,
        disk_pool: DiskPool | None = None,
        structured: RowGrammars | None = None,
        ranks: Ranks | None = None,
        drafter: Drafter | None = None,
        adapters: Mapping[int, Adapter] = NO_ADAPTERS,
        slots: AdapterSlots | None = None,
        *,
        takes_parts: bool = True,
    ) -> None:
        """Optional parts are None if they are not configured.

        `host_pool` is for swaps, and `disk_pool` is for stores and loads. `structured` has the
        rows' grammars. `ranks` are the other devices of the model. `drafter` guesses tokens; it
        must be None if the model has several devices. `slots` keeps `adapters`, and adapters
        added later, where CUDA graphs can use them. `takes_parts`: whether the model can compute a
        step in parts when memory is short.
        """
        self._pool = pool
        self._limits = limits
        self._device = device
        self._spans = spans or SequenceSpans()
        self.rows = Rows(limits, has_guesses=drafter is not None)
        self.labels = BlockLabels(limits)
        self._structured = structured
        self._moves = BlockMoves(pool, host_pool, disk_pool, self.labels, device, ranks)
        sampler = Sampler(limits.max_num_seqs, limits.vocab_size, eos_token_ids, device, structured)
        self._adapters = AdapterTable(adapters, self.rows.adapters_in_use, slots)
        self._sampler: Sampling = sampler if ranks is None else share_sampling(sampler, ranks)
        self._speculation = (
            None if drafter is None else Speculation(drafter, limits, self.rows, sampler)
        )
        self._busy = BusyClock(device)
        self._model_runner = ModelRunner(
            model,
            pool,
            self.rows,
            self._sampler,
            limits,
            device,
            takes_parts=takes_parts and ranks is None,
            is_all_known=drafter is not None,
            adapters=self._adapters.by_number,
            slots=slots,
            before_launch=self._busy.begin,
        )

    @torch.inference_mode()
    def capture_decodes(
        self,
        backend: GraphBackend,
        report: Callable[[float], None],
        *,
        shares_prefixes: bool = False,
        has_adapters: bool = False,
    ) -> None:
        self._model_runner.capture_decodes(
            backend, report, shares_prefixes=shares_prefixes, has_adapters=has_adapters
        )

    @torch.inference_mode()
    def capture_pieces(
        self, backend: GraphBackend, report: Callable[[float], None], *, has_adapters: bool = False
    ) -> None:
        self._model_runner.capture_pieces(backend, report, has_adapters=has_adapters)

    def rehearsal(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for warm-up steps; what speculation measures in them is discarded."""
        speculation = self._speculation
        return contextlib.nullcontext() if speculation is None else speculation.rehearsal()

    @property
    def max_in_flight(self) -> int:
        """At most this many steps may be launched and not yet collected."""
        return 2 if self._device.type == "cuda" and self._speculation is None else 1

    def bind_thread(self) -> None:
        """Set torch's state for the calling thread. This thread must also make all later calls."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        else:
            torch.set_num_threads(torch.get_num_threads())

    def reset(self) -> Holdings:
        """Forget all sequences; KV contents stay. All steps must have been collected.

        Returns:
            Everything that the worker held before this call.
        """
        self._moves.finish()
        holdings = self.labels.holdings(self.rows)
        self._forget_sequences()
        return holdings

    def distrust(self) -> None:
        """Forget all sequences and labels, because a failed step may have written to any block."""
        self._forget_sequences()
        self.labels.clear()
        self._moves.distrust()

    def _forget_sequences(self) -> None:
        self._moves.forget()
        self._spans.clear(time.time())
        self._sampler.release(range(self._limits.max_num_seqs))
        self.rows.clear()
        self._adapters.free_unused()

    def resize_pool(self, num_blocks: int) -> None:
        """Resize the device pool to `num_blocks` blocks. All steps must have been collected.

        Blocks that stay keep their contents; new ones are zero.

        Raises:
            FailedPreconditionError: A row uses a block that would be removed, or memory is short.
                Nothing has changed.
        """
        row = self.rows.first_with_block_from(num_blocks)
        if row is not None:
            raise FailedPreconditionError(
                f"num_blocks is {num_blocks}; row {row} uses a block that would be removed"
            )
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # copies may still read the removed blocks
        try:
            self._pool.resize(num_blocks)
        except (OutOfMemoryError, VirtualMemoryError) as error:
            raise FailedPreconditionError(f"num_blocks is {num_blocks}: {error}") from error
        self.labels.resize_device(num_blocks)

    def add_adapter(self, number: int, adapter: Adapter) -> None:
        """Let new rows use an adapter as `number`; no earlier adapter may have had this number."""
        self._adapters.add(number, adapter)

    def remove_adapter(self, number: int) -> None:
        """Free an adapter as soon as no row uses it; new rows must not use it."""
        self._adapters.remove(number)

    def close(self) -> None:
        """End all threads and free the memory. No other call may follow."""
        self._moves.close()
        if self._structured is not None:
            self._structured.close()

    @property
    def host_pool(self) -> HostPool | None:
        """None if the worker has no host tier."""
        return self._moves.host_pool

    def step(self, plan: Plan) -> Result:
        return self.collect(self.launch(plan))

    @torch.inference_mode()
    def launch(self, plan: Plan) -> LaunchedStep:
        """Apply a step's changes and start its computation.

        1. The rows change: sequences leave, join, and get more blocks. This determines which rows
           compute; a drafter may add guesses to them.
        2. Blocks get the labels of the plan. Labels move with their blocks, and blocks that the
           step writes to lose theirs.
        3. Blocks move, in a fixed order. Stores to the disk and loads from it start first. Then
           swap-outs read blocks, before anything overwrites them. Swap-ins and copies come last.
        4. The step computes: inputs are gathered from the rows, the model runs, and each row whose
           known tokens are all computed samples a token.

        On CUDA the device's work is only enqueued, in stream order. The results are copied to the
        host, where `collect` reads them.

        Raises:
            InvalidArgumentError, InconsistentPlanError: See `Rows.apply`. After such an error, call
                `reset` before the next step.
        """
        start_s = time.monotonic()
        with timeline.span("change the rows"):
            scheduled = self.rows.apply(plan)
            self._change_sequences(plan)
        if self._speculation is not None:
            with timeline.span("draft"):
                scheduled = self._speculation.extend(plan, scheduled)
        self.labels.apply(plan, self.rows, scheduled)  # guessed tokens are written, too
        self._busy.begin_step()
        with timeline.span("move blocks"):
            failed_swap_ins = self._moves.start(plan)
        readback: Readback | None = None
        prompt_scores: tuple[PromptScoresReadback, ...] = ()
        if len(scheduled.rows):
            sampled, prompt_scores = self._model_runner.run(scheduled)
            if sampled:
                readback = Readback(merged(sampled))
                # Advances the grammars when the tokens arrive, perhaps on another thread.
                self._sampler.follow(scheduled.rows[scheduled.sampling], readback.token_ids)
        self._busy.end()
        disk_pool = None if len(scheduled.rows) else self._moves.disk_pool
        return LaunchedStep(
            plan.step_id, scheduled, readback, prompt_scores, failed_swap_ins, start_s, disk_pool
        )

    def collect(self, launched: LaunchedStep) -> Result:
        """Wait for the oldest launched step and return its result.

        A row may have ended since the step was launched, or hold another sequence now. So a result
        belongs to an *incarnation* of a row: the row's time with one sequence. Results are handled
        in this order:

        1. Tokens of ended rows are dropped, and so are tokens after a wrong guess.
        2. A row fails if its logits were not finite, and is stuck if its grammar allows no token.
           Every other row has sampled.
        3. Rows that failed, are stuck, or sampled an end token end now: later steps skip these
           rows, although the scheduler counts the rows as decoding until it releases them.
        4. The rows store the sampled tokens and their log-probabilities. The drafter learns which
           guesses were kept. Traced sequences get spans.
        5. A failed row may have stored wrong KV, so its blocks lose their labels.
        6. Disk moves that have ended are reported with the result.
        """
        scheduled, readback = launched.scheduled, launched.readback
        sampled = NOTHING_SAMPLED if readback is None else readback.wait()
        metrics.DEVICE_BUSY_SECONDS.inc(self._busy.take_s())
        rows = scheduled.rows[scheduled.sampling]
        incarnations = scheduled.incarnations[scheduled.sampling]
        is_live = ~self.rows.has_ended(rows, incarnations)
        if self._speculation is not None:
            is_live &= self._speculation.keep(scheduled, sampled.token_ids, sampled.is_finite)
        has_failed = is_live & ~sampled.is_finite
        is_stuck = np.zeros(len(rows), np.bool_)
        is_stuck[sampled.stuck] = True
        is_stuck &= is_live & ~has_failed
        has_sampled = is_live & ~has_failed & ~is_stuck
        stops = has_sampled & self._sampler.table.ends(rows, sampled.token_ids)
        ended = stops | has_failed | is_stuck
        if ended.any():
            num_tokens = scheduled.positions + has_sampled
            self.rows.end(rows[ended], incarnations[ended], num_tokens[ended], stops[ended])
        self.rows.store_sampled(rows, incarnations, scheduled.positions, sampled.token_ids)
        logprobs = _of_sampled(sampled.logprobs, has_sampled)
        if logprobs:
            self.rows.store_logprobs(rows[has_sampled], incarnations[has_sampled], logprobs)
        execute_s = time.monotonic() - launched.start_s
        if self._speculation is not None:
            self._speculation.advance(scheduled, has_sampled, execute_s)
        if self._spans.has_any:
            has_row = has_sampled & self.rows.is_current(rows, incarnations)
            now_s = time.time()
            start_s = now_s - execute_s
            self._spans.computed(launched.step_id, scheduled, rows[has_row], start_s, now_s)
        if has_failed.any():
            failed = rows[has_failed & self.rows.is_current(rows, incarnations)]
            self._moves.distrust(self.labels.distrust(self.rows, failed))
        disk = self._moves.take_ended(launched.step_id)
        return Result(
            step_id=launched.step_id,
            sampled_rows=rows[has_sampled].astype(np.int32),
            sampled_token_ids=sampled.token_ids[has_sampled].astype(np.int32),
            stopped_rows=rows[stops].astype(np.int32),
            failed_rows=rows[has_failed].astype(np.int32),
            stuck_rows=rows[is_stuck].astype(np.int32),
            failed_swap_in_block_ids=launched.failed_swap_in_block_ids,
            stored_disk_block_ids=disk.stored,
            failed_disk_block_ids=disk.failed_stores,
            loaded_host_block_ids=disk.loaded,
            failed_host_block_ids=disk.failed_loads,
            logprobs=logprobs,
            pooled=tuple(
                PooledRow(int(rows[place]), vector)
                for place, vector in sampled.vectors
                if has_sampled[place]
            ),
            prompt_logprobs=tuple(
                logprobs for scores in launched.prompt_scores for logprobs in scores.wait()
            ),
            num_computed_tokens=scheduled.num_tokens,
            execute_s=execute_s,
            head_start_s=(
                head_start_s(scheduled, self.rows.num_prompt, execute_s)
                if self._device.type == "cpu"
                else 0.0
            ),
        )

    def _change_sequences(self, plan: Plan) -> None:
        """Pass released and new sequences to the sampler, the adapters and the spans."""
        released = plan.released_rows.tolist()
        if released:
            self._spans.released(released, time.time())
            self._sampler.release(released)
            self._adapters.free_unused()
        if plan.new_sequences:
            self._spans.opened(plan.new_sequences, time.time())
        for new in plan.new_sequences:
            self._sampler.add(new.row, new.params, new.token_ids, new.num_prompt_tokens)


def _of_sampled(
    logprobs: tuple[StepLogprob, ...], has_sampled: BoolArray
) -> tuple[StepLogprob, ...]:
    """Keep only log-probabilities of rows that sampled; `index` then counts only these rows."""
    if not logprobs:
        return ()
    places = np.cumsum(has_sampled) - 1
    return tuple(
        replace(logprob, index=int(places[logprob.index]))
        for logprob in logprobs
        if has_sampled[logprob.index]
    )
