"""Between a worker's messages and the core's plans and outcomes.

A step costs work per array, not per sequence.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quire.v1 import common_pb2, worker_pb2
from rpc.errors import InvalidArgumentError
from rpc.packing import pack_int32, unpack_int32
from scheduler_svc.core.plan import Int32Array, NewSequence, StepId, StepOutcome, StepPlan, ints
from scheduler_svc.domain import ModelInfo, WorkerInfo
from scheduler_svc.wire.arrays import check_below

_KV_COMMANDS = tuple(field.name for field in worker_pb2.KvCommands.DESCRIPTOR.fields)
"""Lists of blocks; they have the same names in a plan."""


_MAX_NUM_SEQS = 2**16
_MAX_BLOCKS = 2**24
_MAX_BLOCK_SIZE = 2**16
_MAX_TOKENS = 2**32
"""The core keeps arrays of these sizes: what a worker says must not exhaust the scheduler."""

_NO_LOGPROB = common_pb2.TokenLogprob()


@dataclass(frozen=True, slots=True, eq=False)
class WorkerResult:
    """One step's result: what the core must know, and what only passes through to the routers."""

    outcome: StepOutcome
    logprobs: Sequence[worker_pb2.SampledLogprob]
    prompt_logprobs: Sequence[worker_pb2.PromptLogprobs]
    execute_s: float
    """Time the worker spent on the step."""


def worker_info_from_proto(message: worker_pb2.WorkerInfo) -> WorkerInfo:
    """Take a worker's description of itself.

    Raises:
        InvalidArgumentError: A number is out of its range.
    """
    info = WorkerInfo(
        worker_id=message.worker_id,
        device=message.device,
        model=ModelInfo(
            id=message.model.id,
            max_model_len=message.model.max_model_len,
            vocab_size=message.model.vocab_size,
            eos_token_ids=tuple(message.model.eos_token_ids),
            structured_output=message.model.structured_output,
        ),
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
        num_blocks=message.num_blocks,
        block_size=message.block_size,
        block_bytes=message.block_bytes,
        num_host_blocks=message.num_host_blocks,
        swap_bytes_per_s=message.swap_bytes_per_s,
        prefill_tokens_per_s=message.prefill_tokens_per_s,
        num_disk_blocks=message.num_disk_blocks,
        disk_bytes_per_s=message.disk_bytes_per_s,
        dtype=message.dtype,
        instance_id=message.instance_id,
        takes_kv=message.takes_kv,
        num_draft_tokens=message.num_draft_tokens,
        max_num_blocks=message.max_num_blocks if message.HasField("max_num_blocks") else None,
        min_num_blocks=message.min_num_blocks or 1,
    )
    most_blocks = info.num_blocks if info.max_num_blocks is None else info.max_num_blocks
    for field, value, least, most in (
        ("model.max_model_len", info.model.max_model_len, 1, 2**31 - 1),
        ("model.vocab_size", info.model.vocab_size, 1, 2**31 - 1),
        ("max_num_seqs", info.max_num_seqs, 1, _MAX_NUM_SEQS),
        ("max_num_batched_tokens", info.max_num_batched_tokens, 1, 2**31 - 1),
        ("num_blocks", info.num_blocks, 1, _MAX_BLOCKS),
        ("max_num_blocks", most_blocks, info.num_blocks, _MAX_BLOCKS),
        ("min_num_blocks", info.min_num_blocks, 1, info.num_blocks),
        ("num_host_blocks", info.num_host_blocks, 0, _MAX_BLOCKS),
        ("num_disk_blocks", info.num_disk_blocks, 0, _MAX_BLOCKS),
        ("block_size", info.block_size, 1, _MAX_BLOCK_SIZE),
    ):
        if not least <= value <= most:
            raise InvalidArgumentError(
                f"worker.{field}", f"is {value}; it must be in [{least}, {most}]"
            )
    for token_id in info.model.eos_token_ids:
        if token_id >= info.model.vocab_size:
            raise InvalidArgumentError(
                "worker.model.eos_token_ids",
                f"has {token_id}; ids must be in [0, {info.model.vocab_size})",
            )
    num_tokens = min(info.model.max_model_len, most_blocks * info.block_size)
    if info.max_num_seqs * num_tokens > _MAX_TOKENS:
        raise InvalidArgumentError(
            "worker.max_num_seqs",
            f"is {info.max_num_seqs}, of up to {num_tokens} tokens each; the product must be at"
            f" most {_MAX_TOKENS}",
        )
    for field, rate in (
        ("swap_bytes_per_s", info.swap_bytes_per_s),
        ("prefill_tokens_per_s", info.prefill_tokens_per_s),
        ("disk_bytes_per_s", info.disk_bytes_per_s),
    ):
        if not 0 <= rate < math.inf:  # false for NaN
            raise InvalidArgumentError(f"worker.{field}", f"is {rate}; it must be in [0, inf)")
    if info.max_num_batched_tokens < info.max_num_seqs:
        raise InvalidArgumentError(
            "worker.max_num_batched_tokens",
            f"is {info.max_num_batched_tokens}; it must be at least max_num_seqs, "
            f"{info.max_num_seqs}",
        )
    if info.num_draft_tokens >= info.block_size:
        raise InvalidArgumentError(
            "worker.num_draft_tokens",
            f"is {info.num_draft_tokens}; it must be less than block_size, {info.block_size}",
        )
    if info.takes_kv and not info.instance_id:
        raise InvalidArgumentError(
            "worker.instance_id", "is 0; a worker that takes KV must have another"
        )
    return info


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
