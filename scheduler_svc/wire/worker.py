"""Between the messages of a worker's steps and the core's plans and outcomes.

A step costs work per array, not per sequence.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from contract.errors import InvalidArgumentError
from contract.packing import pack_int32, unpack_int32
from quire.v1 import common_pb2, worker_pb2
from scheduler_svc.core.plan import Int32Array, NewSequence, StepId, StepOutcome, StepPlan, ints
from scheduler_svc.wire.beam import search_to_note
from scheduler_svc.wire.checks import check_below

_KV_COMMANDS = tuple(field.name for field in worker_pb2.KvCommands.DESCRIPTOR.fields)
"""Lists of blocks; they have the same names in a plan."""
_NO_LOGPROB = common_pb2.TokenLogprob()


@dataclass(frozen=True, slots=True, eq=False)
class WorkerResult:
    """One step's result: what the core must know, and what only passes through to the routers."""

    outcome: StepOutcome
    logprobs: Sequence[worker_pb2.SampledLogprob]
    prompt_logprobs: Sequence[worker_pb2.PromptLogprobs]
    execute_s: float
    """Time the worker spent on the step."""


def plan_to_proto(plan: StepPlan, epoch: int, step_id_base: int) -> worker_pb2.StepBatch:
    """Make the batch for `plan`; its step id on the wire is `step_id_base` + the plan's."""
    batch = worker_pb2.StepBatch(
        epoch=epoch,
        step_id=step_id_base + plan.step_id,
        released_rows=pack_int32(plan.released_rows),
        new_sequences=map(_new_sequence_to_proto, plan.new_sequences),
        appended_rows=pack_int32(plan.appended_rows),
        appended_block_ids=pack_int32(plan.appended_block_ids),
        chunk_rows=pack_int32(plan.chunk_rows),
        chunk_lens=pack_int32(plan.chunk_lens),
        num_decodes=plan.num_decodes,
    )
    if plan.labelled_block_ids.size:
        batch.labelled_block_ids = pack_int32(plan.labelled_block_ids)
        batch.labels = plan.labels.tobytes()
    if plan.pins:
        batch.pinned_labels = b"".join(name for name, _ in plan.pins)
        batch.pinned_s.extend(seconds for _, seconds in plan.pins)
    if plan.renamed_src_block_ids.size:
        batch.renamed_src_block_ids = pack_int32(plan.renamed_src_block_ids)
        batch.renamed_dst_block_ids = pack_int32(plan.renamed_dst_block_ids)
    for field in _KV_COMMANDS:
        if (block_ids := getattr(plan, field)).size:
            setattr(batch.kv_commands, field, pack_int32(block_ids))
    return batch


def _new_sequence_to_proto(seq: NewSequence) -> worker_pb2.NewSequence:
    return worker_pb2.NewSequence(
        seq_id=seq.seq_id,
        row=seq.row,
        token_ids=pack_int32(seq.token_ids),
        num_prompt_tokens=seq.num_prompt_tokens,
        num_computed_tokens=seq.num_computed_tokens,
        block_ids=pack_int32(seq.block_ids),
        sampling=common_pb2.SamplingParams.FromString(seq.sampling),
        max_total_tokens=seq.max_total_tokens,
        traceparent=seq.traceparent,
        output_index=seq.output_index,
        identity=seq.identity,
        note=b"" if seq.search is None else search_to_note(seq.search),
    )


def result_from_proto(
    message: worker_pb2.StepResult, step_id_base: int, max_num_seqs: int
) -> WorkerResult:
    """Take a worker's result; `step_id_base` as in `plan_to_proto`.

    Raises:
        InvalidArgumentError: Arrays that must be parallel are not, or a row is out of range.
    """
    sampled_rows = _rows_from_proto(message.sampled_rows, "sampled_rows", max_num_seqs)
    sampled_token_ids = unpack_int32(message.sampled_token_ids, "sampled_token_ids")
    if sampled_token_ids.size != sampled_rows.size:
        raise InvalidArgumentError(
            "sampled_token_ids",
            f"has {sampled_token_ids.size} entries; it must have those of sampled_rows, "
            f"{sampled_rows.size}",
        )
    if not 0 <= message.execute_s < math.inf:  # false for NaN
        raise InvalidArgumentError("execute_s", f"is {message.execute_s}; it must be at least 0")
    return WorkerResult(
        outcome=StepOutcome(
            step_id=StepId(message.step_id - step_id_base),
            sampled_rows=sampled_rows,
            sampled_token_ids=sampled_token_ids,
            stopped_rows=_rows_from_proto(message.stopped_rows, "stopped_rows", max_num_seqs),
            failed_rows=_rows_from_proto(message.failed_rows, "failed_rows", max_num_seqs),
            stuck_rows=_rows_from_proto(message.stuck_rows, "stuck_rows", max_num_seqs),
            # Which these may be is the core's to say: those that it moves.
            failed_swap_in_block_ids=unpack_int32(
                message.failed_swap_in_block_ids, "failed_swap_in_block_ids"
            ),
            stored_disk_block_ids=unpack_int32(
                message.stored_disk_block_ids, "stored_disk_block_ids"
            ),
            failed_disk_block_ids=unpack_int32(
                message.failed_disk_block_ids, "failed_disk_block_ids"
            ),
            loaded_host_block_ids=unpack_int32(
                message.loaded_host_block_ids, "loaded_host_block_ids"
            ),
            failed_host_block_ids=unpack_int32(
                message.failed_host_block_ids, "failed_host_block_ids"
            ),
        ),
        logprobs=message.logprobs,
        prompt_logprobs=message.prompt_logprobs,
        execute_s=message.execute_s,
    )


def with_candidates(result: WorkerResult, beam_rows: Collection[int]) -> StepOutcome:
    """Return the outcome with the likeliest tokens of the rows that are beams, if there are any.

    A beam that sampled and has no log-probabilities has no candidates.
    """
    outcome = result.outcome
    if not beam_rows:
        return outcome
    index_to_logprob = {item.index: item.logprob for item in result.logprobs}
    candidates = [
        (row, index_to_logprob.get(index, _NO_LOGPROB))
        for index, row in enumerate(outcome.sampled_rows.tolist())
        if row in beam_rows
    ]
    tops = [logprob for _, logprob in candidates]
    return replace(
        outcome,
        candidate_rows=ints([row for row, _ in candidates]),
        candidate_counts=ints([len(top.top_token_ids) for top in tops]),
        candidate_token_ids=ints([id_ for top in tops for id_ in top.top_token_ids]),
        candidate_logprobs=np.array([p for top in tops for p in top.top_logprobs], np.float32),
    )


def _rows_from_proto(packed: bytes, field: str, max_num_seqs: int) -> Int32Array:
    rows = unpack_int32(packed, field)
    check_below(rows, field, max_num_seqs, "max_num_seqs")
    return rows
