"""Runs one simulated worker's steps: changes rows and blocks at once, but returns results later."""

import asyncio
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from contract.arrays import BoolArray, Int32Array, Int64Array
from contract.errors import FailedPreconditionError, UnavailableError, UnimplementedError
from contract.state import Holdings
from contract.step import Plan, PromptLogprobs, Result, StepId, StepLogprob
from contract.worker_limits import Limits
from gpu_worker import metrics
from gpu_worker.sampling.params import SamplingTable
from gpu_worker.step.block_labels import BlockLabels
from gpu_worker.step.rows import Rows, ScheduledRows
from gpu_worker.step.spans import SequenceSpans
from sim_worker.block_ledger import BlockLedger
from sim_worker.disk_moves import DiskMoves
from sim_worker.draw import Script, TokenSource
from sim_worker.tier_ledger import TierLedger
from sim_worker.time_model import TimeModel


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A step without a result yet."""

    attachment: int
    scheduled: ScheduledRows
    output: Result
    result: "asyncio.Future[Result]"


class SimulatedSteps:
    """The `Steps` of a `gpu_worker.service.api.WorkerService`; used in one event loop."""

    def __init__(
        self,
        limits: Limits,
        *,
        eos_token_ids: tuple[int, ...],
        mean_output_len: float | None,
        time_model: TimeModel,
        speedup: float,
        block_bytes: int = 0,
        script: Script | None = None,
    ) -> None:
        """`block_bytes` may be 0 if there are neither host blocks nor disk blocks."""
        self._script = script
        self._limits = limits
        self._rows = Rows(limits)
        self._labels = BlockLabels(limits)
        self._tiers = TierLedger(limits)
        self._ledger = BlockLedger(limits, self._tiers)
        self._block_bytes = block_bytes
        self._sampling = SamplingTable(limits.max_num_seqs, limits.vocab_size, eos_token_ids)
        self._heeds_eos = np.zeros(limits.max_num_seqs, np.bool_)
        self._tokens = TokenSource(limits.vocab_size, eos_token_ids, mean_output_len)
        self._time_model = time_model
        self._speedup = speedup
        self._disk = self._idle_disk()
        self._idle: list[_Pending] = []
        """Steps without tokens that wait for the disk."""
        self._computing_step_id = 0
        """The last step that has tokens to compute."""
        self._spans = SequenceSpans()
        self._event_loop = asyncio.get_running_loop()
        self._attachment: int | None = None
        self._free_at_s = 0.0
        """When the device will have finished all steps so far."""

    @property
    def num_rows_used(self) -> int:
        """Number of rows that hold a sequence."""
        return self._rows.num_used

    async def attach(self, attachment: int) -> Holdings:
        """Forget all rows and disk moves; accept only steps of `attachment` from now on.

        Returns:
            What the worker held before.
        """
        holdings = self._labels.holdings(self._rows)
        self._forget()
        self._attachment = attachment
        return holdings

    async def read_host_blocks(self, block_ids: Int32Array) -> bytes:
        """Raise UnimplementedError, because a simulated worker has no KV."""
        raise UnimplementedError(f"ReadKv of {len(block_ids)} blocks: a simulated worker has no KV")

    async def checksum_host_blocks(self, block_ids: Int32Array) -> int:
        """Raise UnimplementedError, as `read_host_blocks` does."""
        raise UnimplementedError(f"ReadKv of {len(block_ids)} blocks: a simulated worker has no KV")

    async def resize_pool(self, num_blocks: int) -> None:
        """Set the number of device blocks; no step in flight may use blocks that are removed.

        Raises:
            FailedPreconditionError: A row has a block that would be removed.
        """
        row = self._rows.first_with_block_from(num_blocks)
        if row is not None:
            raise FailedPreconditionError(
                f"num_blocks is {num_blocks}; row {row} uses a block that would be removed"
            )
        self._ledger.resize(num_blocks)
        self._labels.resize_device(num_blocks)

    async def write_host_blocks(self, block_ids: Int32Array, content: object) -> None:
        """Raise UnimplementedError, because a simulated worker has no KV."""
        del content
        raise UnimplementedError(f"PullKv of {len(block_ids)} blocks: a simulated worker has no KV")

    def submit(self, attachment: int, plan: Plan) -> "asyncio.Future[Result]":
        """Run a step; the result comes when the device would have finished.

        A step that fails ends its attachment: later steps raise UnavailableError.
        """
        result: asyncio.Future[Result] = self._event_loop.create_future()
        if attachment != self._attachment:
            result.set_exception(UnavailableError("an earlier step failed; attach again"))
            return result
        try:
            scheduled, output = self._run(plan)
        except Exception as error:  # noqa: BLE001 - raised to the caller that sent the step
            self._forget()
            self._labels.clear()
            self._attachment = None
            result.set_exception(error)
            return result
        self._free_at_s = max(time.monotonic(), self._free_at_s) + output.execute_s
        if output.num_computed_tokens:
            self._computing_step_id = plan.step_id
            for waiting in self._idle:
                self._finish_at(0.0, waiting)
            self._idle.clear()
        self._finish_at(self._free_at_s, _Pending(attachment, scheduled, output, result))
        return result

    def _finish_at(self, when_s: float, pending: "_Pending") -> None:
        delay_s = when_s - time.monotonic()
        self._event_loop.call_later(delay_s, self._finish, pending)

    def _finish(self, pending: "_Pending") -> None:
        """Set a step's result, unless it waits for the disk."""
        output, now_s = pending.output, time.monotonic()
        if pending.result.done():  # it has a result already, or its stream has ended
            return
        if pending.attachment == self._attachment:
            end_s = self._disk.next_end_s(output.step_id)
            if end_s is not None and end_s > now_s and output.step_id > self._computing_step_id:
                self._idle.append(pending)
                self._finish_at(end_s, pending)
                return
            output = self._with_disk_moves(output, now_s)
        metrics.STEP_SECONDS.observe(output.execute_s)
        metrics.COMPUTED_TOKENS.inc(output.num_computed_tokens)
        metrics.SAMPLED_TOKENS.inc(len(output.sampled_rows))
        end_s = time.time()
        self._spans.computed(
            output.step_id,
            pending.scheduled,
            output.sampled_rows.astype(np.int64),
            end_s - output.execute_s,
            end_s,
        )
        pending.result.set_result(output)

    def _with_disk_moves(self, output: Result, now_s: float) -> Result:
        stored = self._disk.take_stored(output.step_id, now_s)
        loaded = self._disk.take_loaded(output.step_id, now_s)
        self._tiers.end_stores(stored)
        self._tiers.end_loads(loaded)
        none = np.empty(0, np.int32)
        self._labels.end_stores(stored, none)
        self._labels.end_loads(loaded, none)
        return replace(output, stored_disk_block_ids=stored, loaded_host_block_ids=loaded)

    def _move_to_and_from_disk(self, plan: Plan) -> None:
        src, dst = plan.disk_store_src_block_ids, plan.disk_store_dst_block_ids
        self._tiers.store(src, dst)
        self._disk.store(dst, plan.step_id, time.monotonic())
        src, dst = plan.disk_load_src_block_ids, plan.disk_load_dst_block_ids
        self._tiers.load(src, dst)
        self._disk.load(dst, plan.step_id, time.monotonic())

    def _idle_disk(self) -> DiskMoves:
        return DiskMoves(self._block_bytes / self._time_model.disk_bytes_per_s / self._speedup)

    def _forget(self) -> None:
        self._rows.clear()
        self._ledger.clear()
        self._tiers.clear()
        self._labels.forget_disk_moves()
        self._disk = self._idle_disk()
        self._idle.clear()
        self._computing_step_id = 0
        self._spans.clear(time.time())

    def _run(self, plan: Plan) -> tuple[ScheduledRows, Result]:
        tables, num_blocks = self._rows.block_tables, self._rows.num_blocks
        released = [tables[row, : num_blocks[row]].copy() for row in plan.released_rows]
        scheduled = self._rows.apply(plan)
        self._move_to_and_from_disk(plan)
        self._ledger.apply(plan, released, self._rows, scheduled)
        self._labels.apply(plan, self._rows, scheduled)
        self._spans.released(plan.released_rows.tolist(), time.time())
        self._spans.opened(plan.new_sequences, time.time())
        for new in plan.new_sequences:
            self._sampling.set(new.row, new.params)
            self._heeds_eos[new.row] = not new.params.ignore_eos
        num_context_tokens = int((scheduled.starts + scheduled.lens).sum())
        step_s = self._time_model.step_s(
            scheduled.num_tokens,
            num_context_tokens,
            len(plan.swap_out_src_block_ids) * self._block_bytes,
            len(plan.swap_in_src_block_ids) * self._block_bytes,
        )
        return scheduled, self._sample(plan.step_id, scheduled, step_s / self._speedup)

    def _sample(self, step_id: StepId, scheduled: ScheduledRows, execute_s: float) -> Result:
        rows = scheduled.rows[scheduled.sampling]
        incarnations = scheduled.incarnations[scheduled.sampling]
        positions = (scheduled.starts + scheduled.lens)[scheduled.sampling]
        num_outputs = positions - self._rows.num_prompt[rows]
        may_end = num_outputs >= self._sampling.min_tokens[rows]
        may_draw_eos = may_end & self._heeds_eos[rows]
        token_ids = self._tokens.draw(self._sampling.seed[rows], positions, may_draw_eos)
        if self._script is not None:
            for i, row in enumerate(rows.tolist()):
                prompt = self._rows.token_ids[row, : self._rows.num_prompt[row]]
                token_ids[i] = self._script.token(prompt, int(num_outputs[i]))
        stops = self._sampling.ends(rows, token_ids)
        for index in np.flatnonzero(stops & ~may_end).tolist():
            token_ids[index] = self._another(rows[index], token_ids[index])
        stops &= may_end
        self._rows.end(rows[stops], incarnations[stops], positions[stops] + 1, stops[stops])
        self._rows.store_sampled(rows, incarnations, positions, token_ids)
        logprobs = self._logprobs(rows, token_ids)
        self._rows.store_logprobs(rows, incarnations, logprobs)
        sampled_rows = rows.astype(np.int32)
        return Result(
            step_id=step_id,
            sampled_rows=sampled_rows,
            sampled_token_ids=token_ids.astype(np.int32),
            stopped_rows=sampled_rows[stops],
            failed_rows=np.empty(0, np.int32),
            logprobs=logprobs,
            prompt_logprobs=tuple(self._prompt_logprobs(scheduled)),
            num_computed_tokens=scheduled.num_tokens,
            execute_s=execute_s,
        )

    def _another(self, row: int, token_id: int) -> int:
        """Return the first token id after `token_id` that does not end the row."""
        ends = self._sampling.end_token_ids[row]
        ids = ((token_id + i) % self._limits.vocab_size for i in range(1, self._limits.vocab_size))
        return int(next((id_ for id_ in ids if id_ not in ends), token_id))

    def _prompt_logprobs(self, scheduled: ScheduledRows) -> Iterator[PromptLogprobs]:
        """Yield uniform log-probabilities for the prompts whose requests ask for them."""
        for i in np.flatnonzero(self._sampling.wants_prompt_logprobs[scheduled.rows]).tolist():
            row, start = int(scheduled.rows[i]), int(scheduled.starts[i])
            end = min(start + int(scheduled.lens[i]), int(self._rows.num_prompt[row]) - 1)
            if end > start:
                token_ids = self._rows.token_ids[row, start + 1 : end + 1].astype(np.int64)
                num_top = int(self._sampling.num_top_prompt_logprobs[row])
                scores = tuple(
                    self._uniform(index, token_id, num_top)
                    for index, token_id in enumerate(token_ids.tolist())
                )
                yield PromptLogprobs(row, start + 1, scores)

    def _logprobs(self, rows: Int64Array, token_ids: Int64Array) -> tuple[StepLogprob, ...]:
        """Return uniform log-probabilities, the sampled token first, for rows that ask for them."""
        wanting: BoolArray = self._sampling.wants_logprobs[rows]
        return tuple(
            self._uniform(
                index, int(token_ids[index]), int(self._sampling.num_top_logprobs[rows[index]])
            )
            for index in np.flatnonzero(wanting).tolist()
        )

    def _uniform(self, index: int, token_id: int, num_top: int) -> StepLogprob:
        logprob = -math.log(self._limits.vocab_size)
        top_ids = (token_id + np.arange(num_top)) % self._limits.vocab_size
        return StepLogprob(
            index=index,
            logprob=logprob,
            top_token_ids=top_ids.astype(np.int32),
            top_logprobs=np.full(num_top, logprob, np.float32),
        )
