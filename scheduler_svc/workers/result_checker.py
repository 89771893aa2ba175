"""Checks a worker's results against the plans sent to it.

The core trusts results: an unexpected or repeated row would corrupt its state. The plans determine
which rows sample and which blocks move, so rows and blocks are checked here. Only the worker knows
which tokens a row samples and, with draft tokens, how many tokens a decoding row gains. So the
ids and the number of sampled tokens are only checked against limits.
"""

import numpy as np

from contract.arrays import Int32Array
from contract.codec.message_checks import check_top_tokens, check_values
from contract.errors import InvalidArgumentError
from contract.info import WorkerInfo
from contract.step import Plan, Result, StepId
from quire.v1 import worker_pb2

_NEVER = np.iinfo(np.int64).max


class ResultChecker:
    """Records the plans sent on one link and checks their results, with array operations."""

    def __init__(self, info: WorkerInfo) -> None:
        self._vocab_size = info.limits.vocab_size
        self._num_draft_tokens = info.num_draft_tokens
        # A row samples in the steps [first, last]; with draft tokens it may end earlier.
        self._first = np.full(info.limits.max_num_seqs, _NEVER, np.int64)
        self._last = np.zeros(info.limits.max_num_seqs, np.int64)
        self._num_left = np.zeros(info.limits.max_num_seqs, np.int32)
        """How many known tokens each row still has to compute before it samples."""
        self._num_samples = np.zeros(info.limits.max_num_seqs, np.int32)
        """How many tokens each row may sample. With draft tokens a row may sample several in a
        step, so the tokens of each result are subtracted."""
        self._swap_ins: dict[StepId, set[int]] = {}
        """For each step, the device blocks that it swaps in."""
        self._stores: set[int] = set()
        """The disk blocks that are being written."""
        self._loads: set[int] = set()
        """The host blocks that are being loaded from the disk."""

    def on_sent(self, plan: Plan) -> None:
        """Record a plan. Plans must be recorded in the order of their steps."""
        step, released = plan.step_id, plan.released_rows
        if released.size:
            self._last[released] = np.minimum(self._last[released], step - 1)
        for new in plan.new_sequences:
            num_known = len(new.token_ids)
            self._num_left[new.row] = num_known - new.num_computed_tokens
            self._num_samples[new.row] = new.max_total_tokens - num_known
            self._first[new.row] = _NEVER
        if plan.chunk_rows.size:
            self._num_left[plan.chunk_rows] -= plan.chunk_lens
            done = plan.chunk_rows[self._num_left[plan.chunk_rows] == 0]
            self._first[done] = step
            self._last[done] = step + self._num_samples[done] - 1
        if plan.swap_in_dst_block_ids.size:
            self._swap_ins[step] = set(plan.swap_in_dst_block_ids.tolist())
        self._stores.update(plan.disk_store_dst_block_ids.tolist())
        self._loads.update(plan.disk_load_dst_block_ids.tolist())

    def check(self, result: Result, message: worker_pb2.StepResult) -> None:
        """Check the result of the oldest unanswered plan.

        Raises:
            InvalidArgumentError: The result contradicts the plans; the worker must not be used any
                more.
        """
        check_values("sampled_token_ids", result.sampled_token_ids, 0, self._vocab_size - 1)
        ended = (result.failed_rows, result.stuck_rows)
        rows = result.sampled_rows
        if any(more.size for more in ended):
            rows = np.concatenate((rows, *ended))
        self._check_rows(result.step_id, rows)
        stopped = result.stopped_rows
        if stopped.size and not _is_part(stopped, result.sampled_rows):
            raise InvalidArgumentError(
                "stopped_rows", "has a row twice, or one that did not sample"
            )
        for rows in (stopped, *ended):
            if rows.size:
                self._last[rows] = result.step_id
        self._check_logprobs(message, result.sampled_rows.size)
        swapped_in = self._swap_ins.pop(result.step_id, set())
        _remove(swapped_in, result.failed_swap_in_block_ids, "failed_swap_in_block_ids")
        _remove(self._stores, result.stored_disk_block_ids, "stored_disk_block_ids")
        _remove(self._stores, result.failed_disk_block_ids, "failed_disk_block_ids")
        _remove(self._loads, result.loaded_host_block_ids, "loaded_host_block_ids")
        _remove(self._loads, result.failed_host_block_ids, "failed_host_block_ids")

    def _check_logprobs(self, message: worker_pb2.StepResult, num_sampled: int) -> None:
        for item in message.logprobs:
            if item.index >= num_sampled:
                raise InvalidArgumentError(
                    "logprobs.index", f"is {item.index}; it must be in [0, {num_sampled})"
                )
            check_top_tokens(item.logprob, "logprobs", self._vocab_size)
        for scores in message.prompt_logprobs:
            if scores.row >= self._first.size:
                raise InvalidArgumentError(
                    "prompt_logprobs.row", f"is {scores.row}; it must be in [0, {self._first.size})"
                )
            for logprob in scores.logprobs:
                check_top_tokens(logprob, "prompt_logprobs", self._vocab_size)
        for pooled in message.pooled:
            if pooled.row >= self._first.size:
                raise InvalidArgumentError(
                    "pooled.row", f"is {pooled.row}; it must be in [0, {self._first.size})"
                )

    def _check_rows(self, step: StepId, rows: Int32Array) -> None:
        expected = (self._first <= step) & (self._last >= step)
        counts = np.bincount(rows, minlength=expected.size)
        most, is_wrong = expected, counts != expected
        if self._num_draft_tokens:
            most = np.where(self._first < step, self._num_draft_tokens + 1, 1)
            most = np.where(expected, np.minimum(most, self._num_samples), 0)
            is_wrong = (counts < expected) | (counts > most)
        if is_wrong.any():
            row = int(np.flatnonzero(is_wrong)[0])
            least = int(expected[row])
            bound = f"{least}" if most[row] == least else f"in [{least}, {most[row]}]"
            raise InvalidArgumentError(
                "sampled_rows",
                f"with failed_rows and stuck_rows has row {row} {counts[row]} times; it must be"
                f" {bound}, by the steps sent",
            )
        if self._num_draft_tokens:
            self._num_samples -= counts.astype(np.int32)
            self._last[expected & (self._num_samples == 0)] = step


def _is_part(rows: Int32Array, of_rows: Int32Array) -> bool:
    found = np.isin(rows, of_rows)
    return bool(found.all()) and np.unique(rows).size == rows.size


def _remove(expected: set[int], block_ids: Int32Array, field: str) -> None:
    """Remove blocks from `expected`; raise InvalidArgumentError if one is not in there."""
    for block in block_ids.tolist():
        if block not in expected:
            raise InvalidArgumentError(field, f"has block {block}; no such move is in progress")
        expected.remove(block)
