"""Converts plans and results to protobuf and back.

An array of integers becomes a field of type `bytes`, and is unpacked without a copy. Only new
sequences, pins, vectors and log-probabilities are converted element by element.
"""

import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final, TypeAlias, cast

import numpy as np

from contract.arrays import Int32Array, no_ints
from contract.codec.message_checks import (
    check_distinct,
    check_num_entries,
    check_number,
    check_parallel,
    check_positive,
    check_size,
    check_values,
    unpack_labels,
)
from contract.codec.packing import pack_int32, unpack_int32
from contract.codec.search import search_to_note
from contract.errors import InvalidArgumentError
from contract.hashing import BlockHash
from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan, PromptLogprobs, Result, StepId, StepLogprob
from contract.worker_limits import Limits
from quire.v1 import common_pb2, worker_pb2

_BATCH_ARRAYS: Final = {
    "released_rows": ("max_num_seqs", True),
    "appended_rows": ("max_num_seqs", True),
    "appended_block_ids": ("num_blocks", False),
    "chunk_rows": ("max_num_seqs", True),
    "renamed_src_block_ids": ("num_blocks", True),
    "renamed_dst_block_ids": ("num_blocks", True),
    "labelled_block_ids": ("num_blocks", False),
}
"""Arrays with the same names in a plan and in a batch. Each name maps to the field of `Limits` that
bounds the values, and to whether the values must be distinct. `chunk_lens` is checked separately.
"""
_MOVES: Final = {
    "copy_src_block_ids": ("num_blocks", False),
    "copy_dst_block_ids": ("num_blocks", True),
    "swap_out_src_block_ids": ("num_blocks", False),
    "swap_out_dst_block_ids": ("num_host_blocks", True),
    "swap_in_src_block_ids": ("num_host_blocks", False),
    "swap_in_dst_block_ids": ("num_blocks", True),
    "disk_store_src_block_ids": ("num_host_blocks", False),
    "disk_store_dst_block_ids": ("num_disk_blocks", True),
    "disk_load_src_block_ids": ("num_disk_blocks", False),
    "disk_load_dst_block_ids": ("num_host_blocks", True),
}
"""Arrays of the batch's `kv_commands`. Each name maps to a field of `Limits` and to whether the
values must be distinct, as in `_BATCH_ARRAYS`."""
_PARALLEL: Final = {
    "chunk_lens": "chunk_rows",
    "renamed_dst_block_ids": "renamed_src_block_ids",
    **{name: name.replace("_dst_", "_src_") for name in _MOVES if "_dst_" in name},
}
_SENT_ARRAYS: Final = (*_BATCH_ARRAYS, "chunk_lens", "placements")
_SEQUENCE_FIELDS: Final = (
    "seq_id",
    "row",
    "num_prompt_tokens",
    "num_computed_tokens",
    "max_total_tokens",
    "output_index",
    "traceparent",
    "identity",
)
_sequence_fields = attrgetter(*_SEQUENCE_FIELDS)
_RESULT_ROWS: Final = ("sampled_rows", "stopped_rows", "failed_rows", "stuck_rows")
_RESULT_ARRAYS: Final = (
    *_RESULT_ROWS,
    "sampled_token_ids",
    "failed_swap_in_block_ids",
    "stored_disk_block_ids",
    "failed_disk_block_ids",
    "loaded_host_block_ids",
    "failed_host_block_ids",
)
_IDENTITY_BYTES: Final = 32
MAX_PIN_S: Final = 10**6
_NOTE_BYTES_PER_TOKEN: Final = 80
_NOTE_BYTES_BESIDES: Final = 1024
# `quire.v1.NewSequence.note` documents these limits of a note's size.

SamplingReader: TypeAlias = Callable[[worker_pb2.NewSequence, Limits], tuple[SamplingParams, int]]
"""Reads a new sequence's sampling parameters and the number of its LoRA adapter.

Raises InvalidArgumentError if the parameters are invalid.
"""


def plan_to_proto(plan: Plan, epoch: int, step_id_base: int) -> worker_pb2.StepBatch:
    """Make the batch for a plan; the batch's step id is `step_id_base` plus the plan's step id."""
    batch = worker_pb2.StepBatch(
        epoch=epoch, step_id=step_id_base + plan.step_id, num_decodes=plan.num_decodes
    )
    for name in _SENT_ARRAYS:
        if (values := getattr(plan, name)).size:
            setattr(batch, name, pack_int32(values))
    for name in _MOVES:
        if (block_ids := getattr(plan, name)).size:
            setattr(batch.kv_commands, name, pack_int32(block_ids))
    if plan.new_sequences:
        batch.new_sequences.extend(map(_new_sequence_to_proto, plan.new_sequences))
    if plan.labels.size:
        batch.labels = plan.labels.tobytes()
    if plan.pins:
        batch.pinned_labels = b"".join(name for name, _ in plan.pins)
        batch.pinned_s.extend(seconds for _, seconds in plan.pins)
    return batch


def plan_from_proto(
    batch: worker_pb2.StepBatch, limits: Limits, read_sampling: SamplingReader
) -> Plan:
    """Parse a batch, except its epoch, which the caller checks.

    Raises:
        InvalidArgumentError: A field is malformed or out of range.
    """
    arrays: dict[str, Any] = {}
    for name, (limit, is_distinct) in _BATCH_ARRAYS.items():
        if packed := getattr(batch, name):
            arrays[name] = _unpack(packed, name, getattr(limits, limit), is_distinct)
    if batch.chunk_lens:
        arrays["chunk_lens"] = chunk_lens = unpack_int32(batch.chunk_lens, "chunk_lens")
        check_values("chunk_lens", chunk_lens, 1, limits.max_num_batched_tokens)
    if batch.placements:
        arrays["placements"] = _unpack_placements(batch.placements, limits)
    if batch.HasField("kv_commands"):
        commands = batch.kv_commands
        for name, (limit, is_distinct) in _MOVES.items():
            if packed := getattr(commands, name):
                field = f"kv_commands.{name}"
                arrays[name] = _unpack(packed, field, getattr(limits, limit), is_distinct)
    if "labelled_block_ids" in arrays or batch.labels:
        num_labelled = len(batch.labelled_block_ids) // 4
        arrays["labels"] = unpack_labels(batch.labels, "labels", "labelled_block_ids", num_labelled)
    if arrays:
        _check_together(arrays, len(limits.kv_windows))
    return Plan(
        step_id=StepId(batch.step_id),
        num_decodes=batch.num_decodes,
        new_sequences=tuple(
            _new_sequence_from_proto(new, limits, read_sampling) for new in batch.new_sequences
        ),
        pins=_pins_from_proto(batch),
        serialize=batch.SerializeToString,
        **arrays,
    )


def result_to_proto(result: Result, epoch: int) -> worker_pb2.StepResult:
    message = worker_pb2.StepResult(epoch=epoch, step_id=result.step_id, execute_s=result.execute_s)
    for name in _RESULT_ARRAYS:
        if (values := getattr(result, name)).size:
            setattr(message, name, pack_int32(values))
    for logprob in result.logprobs:
        message.logprobs.add(index=logprob.index, logprob=token_logprob_to_proto(logprob))
    if result.prompt_logprobs:
        message.prompt_logprobs.extend(map(_prompt_logprobs_to_proto, result.prompt_logprobs))
    for pooled in result.pooled:
        message.pooled.add(row=pooled.row, vector=pooled.vector)
    return message


def result_from_proto(
    message: worker_pb2.StepResult, step_id_base: int, max_num_seqs: int
) -> Result:
    """Parse a result, except the vectors and log-probabilities.

    `step_id_base` is the number that `plan_to_proto` added to the plan's step id. The scheduler's
    `ResultChecker` checks later that the result has the rows and blocks that the plan asks for.

    Raises:
        InvalidArgumentError: A field is malformed or out of range, or `sampled_rows` and
            `sampled_token_ids` differ in length.
    """
    arrays: dict[str, Any] = {
        name: unpack_int32(packed, name)
        for name in _RESULT_ARRAYS
        if (packed := getattr(message, name))
    }
    for name in _RESULT_ROWS:
        if name in arrays:
            check_values(name, arrays[name], 0, max_num_seqs - 1)
    if not 0 <= message.execute_s < math.inf:  # false for NaN
        raise InvalidArgumentError("execute_s", f"is {message.execute_s}; it must be at least 0")
    rows = arrays.get("sampled_rows", ())
    check_parallel("sampled_token_ids", arrays.get("sampled_token_ids", ()), "sampled_rows", rows)
    return Result(StepId(message.step_id - step_id_base), execute_s=message.execute_s, **arrays)


def token_logprob_to_proto(logprob: StepLogprob) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(
        logprob=logprob.logprob,
        top_token_ids=logprob.top_token_ids.tolist(),
        top_logprobs=logprob.top_logprobs.tolist(),
    )


def token_logprob_from_proto(message: common_pb2.TokenLogprob, field: str) -> StepLogprob:
    """Parse the log-probabilities at one position; `field` names them in error messages.

    Raises:
        InvalidArgumentError: `top_token_ids` and `top_logprobs` differ in length.
    """
    check_parallel(
        f"{field}.top_logprobs", message.top_logprobs, "top_token_ids", message.top_token_ids
    )
    return StepLogprob(
        index=0,
        logprob=message.logprob,
        top_token_ids=np.array(message.top_token_ids, np.uint32).view(np.int32),
        top_logprobs=np.array(message.top_logprobs, np.float32),
    )


def _new_sequence_to_proto(seq: NewSequence) -> worker_pb2.NewSequence:
    return worker_pb2.NewSequence(
        **dict(zip(_SEQUENCE_FIELDS, _sequence_fields(seq), strict=True)),
        token_ids=pack_int32(seq.token_ids),
        block_ids=pack_int32(seq.block_ids),
        sampling=common_pb2.SamplingParams.FromString(cast("bytes", seq.sampling)),
        note=b"" if seq.search is None else search_to_note(seq.search),
    )


def _new_sequence_from_proto(
    new: worker_pb2.NewSequence, limits: Limits, read_sampling: SamplingReader
) -> NewSequence:
    token_ids = unpack_int32(new.token_ids, "new_sequences.token_ids")
    block_ids = unpack_int32(new.block_ids, "new_sequences.block_ids")
    num_tokens = len(token_ids)
    check_values("new_sequences.block_ids", block_ids, 0, limits.num_blocks - 1)
    check_num_entries("new_sequences.token_ids", num_tokens, 1, limits.max_model_len - 1)
    check_values("new_sequences.token_ids", token_ids, 0, limits.vocab_size - 1)
    for name, least, most in (
        ("row", 0, limits.max_num_seqs - 1),
        ("num_prompt_tokens", 1, num_tokens),
        ("num_computed_tokens", 0, num_tokens - 1),
        ("max_total_tokens", num_tokens + 1, limits.max_model_len),
    ):
        check_number(f"new_sequences.{name}", getattr(new, name), least, most)
    num_groups = len(limits.kv_windows)
    num_needed_blocks = -(-num_tokens // limits.block_size) * num_groups
    check_num_entries(
        "new_sequences.block_ids", len(block_ids), num_needed_blocks, limits.max_table_len
    )
    if len(block_ids) % num_groups:
        raise InvalidArgumentError(
            "new_sequences.block_ids",
            f"has {len(block_ids)} entries; it must have a multiple of {num_groups}, the KV groups",
        )
    if len(new.identity) not in {0, _IDENTITY_BYTES}:
        raise InvalidArgumentError(
            "new_sequences.identity",
            f"has {len(new.identity)} bytes; it must have {_IDENTITY_BYTES}, or none",
        )
    most_bytes = _NOTE_BYTES_PER_TOKEN * limits.max_model_len + _NOTE_BYTES_BESIDES
    check_size("new_sequences.note", new.note, most_bytes)
    sampling, adapter = read_sampling(new, limits)
    if sampling.pooling is not None and new.max_total_tokens != num_tokens + 1:
        raise InvalidArgumentError(
            "new_sequences.max_total_tokens",
            f"is {new.max_total_tokens}; with sampling.pooling it must be one more than the prompt,"
            f" {num_tokens + 1}",
        )
    return NewSequence(
        **dict(zip(_SEQUENCE_FIELDS, _sequence_fields(new), strict=True)),
        token_ids=token_ids,
        block_ids=block_ids,
        sampling=sampling,
        adapter=adapter,
        note=new.note,
    )


def _unpack(packed: bytes, field: str, end: int, is_distinct: bool) -> Int32Array:
    values = unpack_int32(packed, field)
    check_values(field, values, 0, end - 1)
    if is_distinct:
        check_distinct(field, values)
    return values


def _unpack_placements(packed: bytes, limits: Limits) -> Int32Array:
    values = unpack_int32(packed, "placements")
    if len(values) % 3:
        raise InvalidArgumentError(
            "placements", f"has {len(values)} numbers; each placement must have 3"
        )
    ends = (limits.max_num_seqs, limits.max_table_len, limits.num_blocks)
    for index, end in enumerate(ends):
        check_values("placements", values[index::3], 0, end - 1)
    return values


def _check_together(arrays: Mapping[str, Int32Array], num_groups: int) -> None:
    if "appended_rows" in arrays or "appended_block_ids" in arrays:
        rows = np.repeat(arrays.get("appended_rows", no_ints()), num_groups)
        blocks = arrays.get("appended_block_ids", no_ints())
        check_parallel("appended_block_ids", blocks, "appended_rows", rows)
    for name, other in _PARALLEL.items():
        if name in arrays or other in arrays:
            field = f"kv_commands.{name}" if name in _MOVES else name
            check_parallel(field, arrays.get(name, ()), other, arrays.get(other, ()))
    if "swap_out_src_block_ids" in arrays and "swap_in_src_block_ids" in arrays:
        raise InvalidArgumentError(
            "kv_commands.swap_in_src_block_ids",
            f"has {len(arrays['swap_in_src_block_ids'])} entries in a step that swaps out; it must"
            " have none",
        )


def _pins_from_proto(batch: worker_pb2.StepBatch) -> tuple[tuple[BlockHash, float], ...]:
    if not (batch.pinned_labels or batch.pinned_s):  # true for almost every batch
        return ()
    labels = unpack_labels(batch.pinned_labels, "pinned_labels", "pinned_s", len(batch.pinned_s))
    for seconds in batch.pinned_s:
        check_positive("pinned_s", seconds, MAX_PIN_S)
    hashes = (BlockHash(label.tobytes()) for label in labels)
    return tuple(zip(hashes, batch.pinned_s, strict=True))


def _prompt_logprobs_to_proto(scores: PromptLogprobs) -> worker_pb2.PromptLogprobs:
    return worker_pb2.PromptLogprobs(
        row=scores.row,
        position=scores.position,
        logprobs=map(token_logprob_to_proto, scores.logprobs),
    )
