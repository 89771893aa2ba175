"""Protobuf to the worker's values and back; checks all that can be checked without the rows."""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from gpu_worker.holdings import HeldBlocks, HeldRow, Holdings
from gpu_worker.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from gpu_worker.step import (
    LABEL_BYTES,
    Int32Array,
    Limits,
    NewRow,
    PromptLogprobs,
    StepInput,
    StepOutput,
    TokenLogprob,
)
from gpu_worker.worker_info import WorkerInfo, WorkerState
from quire.v1 import common_pb2, worker_pb2
from rpc.errors import InvalidArgumentError
from rpc.packing import pack_int32, unpack_int32

_IDENTITY_BYTES = 32
_MAX_ROWS_BYTES = 512 * 1024
_MAX_LABELS = 24 * 1024
"""Of one part of the holdings."""
_MAX_LOGIT_BIASES = 1024
_MAX_LOGPROBS = 1024
"""More than a client may ask for: the candidates of a beam search."""


def step_input_from_proto(batch: worker_pb2.StepBatch, limits: Limits) -> StepInput:
    """Parse a batch; its epoch is the caller's affair.

    Raises:
        InvalidArgumentError: names the field that is malformed or out of range.
    """
    appended_rows = _rows(batch.appended_rows, "appended_rows", limits)
    appended_block_ids = _blocks(batch.appended_block_ids, "appended_block_ids", limits.num_blocks)
    chunk_rows = _rows(batch.chunk_rows, "chunk_rows", limits)
    chunk_lens = unpack_int32(batch.chunk_lens, "chunk_lens")
    _require_parallel("appended_block_ids", appended_block_ids, "appended_rows", appended_rows)
    _require_parallel("chunk_lens", chunk_lens, "chunk_rows", chunk_rows)
    _require_range("chunk_lens", chunk_lens, 1, limits.max_num_batched_tokens)
    device, host, disk = limits.num_blocks, limits.num_host_blocks, limits.num_disk_blocks
    copy_src, copy_dst = _moves(batch.kv_commands, "copy", device, device)
    out_src, out_dst = _moves(batch.kv_commands, "swap_out", device, host)
    in_src, in_dst = _moves(batch.kv_commands, "swap_in", host, device)
    store_src, store_dst = _moves(batch.kv_commands, "disk_store", host, disk)
    load_src, load_dst = _moves(batch.kv_commands, "disk_load", disk, host)
    renamed_src = _blocks(batch.renamed_src_block_ids, "renamed_src_block_ids", device)
    renamed_dst = _blocks(batch.renamed_dst_block_ids, "renamed_dst_block_ids", device)
    _require_parallel("renamed_dst_block_ids", renamed_dst, "renamed_src_block_ids", renamed_src)
    _require_distinct("renamed_src_block_ids", renamed_src)
    _require_distinct("renamed_dst_block_ids", renamed_dst)
    labelled = _blocks(batch.labelled_block_ids, "labelled_block_ids", device)
    if len(out_src) and len(in_src):
        raise InvalidArgumentError(
            "kv_commands.swap_in_src_block_ids",
            f"has {len(in_src)} entries in a step that swaps out; it must have none",
        )
    return StepInput(
        step_id=batch.step_id,
        num_decodes=batch.num_decodes,
        released_rows=_rows(batch.released_rows, "released_rows", limits),
        new_rows=tuple(_new_row_from_proto(new, limits) for new in batch.new_sequences),
        appended_rows=appended_rows,
        appended_block_ids=appended_block_ids,
        swap_out_src_block_ids=out_src,
        swap_out_dst_block_ids=out_dst,
        swap_in_src_block_ids=in_src,
        swap_in_dst_block_ids=in_dst,
        renamed_src_block_ids=renamed_src,
        renamed_dst_block_ids=renamed_dst,
        disk_store_src_block_ids=store_src,
        disk_store_dst_block_ids=store_dst,
        disk_load_src_block_ids=load_src,
        disk_load_dst_block_ids=load_dst,
        copy_src_block_ids=copy_src,
        copy_dst_block_ids=copy_dst,
        chunk_rows=chunk_rows,
        chunk_lens=chunk_lens,
        labelled_block_ids=labelled,
        labels=_labels(batch.labels, len(labelled)),
        serialize=batch.SerializeToString,
    )


def step_output_to_proto(output: StepOutput, epoch: int) -> worker_pb2.StepResult:
    """Build the result of a step of `epoch`."""
    return worker_pb2.StepResult(
        epoch=epoch,
        step_id=output.step_id,
        sampled_rows=pack_int32(output.sampled_rows),
        sampled_token_ids=pack_int32(output.sampled_token_ids),
        stopped_rows=pack_int32(output.stopped_rows),
        failed_rows=pack_int32(output.failed_rows),
        stuck_rows=pack_int32(output.stuck_rows),
        failed_swap_in_block_ids=pack_int32(output.failed_swap_in_block_ids),
        stored_disk_block_ids=pack_int32(output.stored_disk_block_ids),
        failed_disk_block_ids=pack_int32(output.failed_disk_block_ids),
        loaded_host_block_ids=pack_int32(output.loaded_host_block_ids),
        failed_host_block_ids=pack_int32(output.failed_host_block_ids),
        logprobs=[_logprob_to_proto(logprob) for logprob in output.logprobs],
        prompt_logprobs=map(_prompt_logprobs_to_proto, output.prompt_logprobs),
        execute_s=output.execute_s,
    )


def holdings_to_proto(holdings: Holdings) -> Iterator[worker_pb2.ReadHoldingsResponse]:
    """Build the parts in which the holdings are told of."""
    part, num_bytes = worker_pb2.ReadHoldingsResponse(), 0
    for row in holdings.rows:
        message = _held_row_to_proto(row)
        num_bytes += message.ByteSize()
        if part.rows and num_bytes > _MAX_ROWS_BYTES:
            yield part
            part, num_bytes = worker_pb2.ReadHoldingsResponse(), message.ByteSize()
        part.rows.append(message)
    if part.rows:
        yield part
    for tier in ("device", "host", "disk"):
        blocks: HeldBlocks = getattr(holdings, tier)
        for first in range(0, len(blocks.block_ids), _MAX_LABELS):
            chosen = slice(first, first + _MAX_LABELS)
            held = worker_pb2.HeldBlocks(
                block_ids=pack_int32(blocks.block_ids[chosen]),
                labels=blocks.labels[chosen].tobytes(),
            )
            yield worker_pb2.ReadHoldingsResponse(**{tier: held})  # type: ignore[arg-type]


def _held_row_to_proto(row: HeldRow) -> worker_pb2.HeldRow:
    return worker_pb2.HeldRow(
        identity=row.identity,
        token_ids=pack_int32(row.token_ids),
        num_computed_tokens=row.num_computed_tokens,
        block_ids=pack_int32(row.block_ids),
        has_stopped=row.has_stopped,
        had_logprobs=row.had_logprobs,
    )


def worker_info_to_proto(info: WorkerInfo) -> worker_pb2.WorkerInfo:
    """Build what `Attach` answers."""
    limits = info.limits
    return worker_pb2.WorkerInfo(
        worker_id=info.worker_id,
        device=info.device,
        model=common_pb2.ModelInfo(
            id=info.model_id,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            eos_token_ids=info.eos_token_ids,
            structured_output=info.structured_output,
        ),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        block_bytes=info.block_bytes,
        num_host_blocks=limits.num_host_blocks,
        swap_bytes_per_s=info.swap_bytes_per_s,
        prefill_tokens_per_s=info.prefill_tokens_per_s,
        num_disk_blocks=limits.num_disk_blocks,
        disk_bytes_per_s=info.disk_bytes_per_s,
        dtype=info.dtype,
        instance_id=info.instance_id,
        takes_kv=info.takes_kv,
        num_draft_tokens=info.num_draft_tokens,
    )


def worker_state_to_proto(
    info: WorkerInfo, state: WorkerState
) -> worker_pb2.DescribeDeviceResponse:
    """Build what `DescribeDevice` answers."""
    return worker_pb2.DescribeDeviceResponse(
        worker=worker_info_to_proto(info),
        epoch=state.epoch,
        step_id=state.step_id,
        num_rows_used=state.num_rows_used,
        has_scheduler=state.has_scheduler,
    )


def sampling_params_from_proto(
    params: common_pb2.SamplingParams, output_index: int, vocab_size: int
) -> SamplingParams:
    """Parse sampling parameters, with `output_index` added to the seed modulo 2^64.

    Raises:
        InvalidArgumentError: a value is out of the range that the proto gives.
    """
    field = "new_sequences.sampling"
    if not params.HasField("seed"):
        raise InvalidArgumentError(f"{field}.seed", "is not set")
    parsed = SamplingParams(
        seed=(params.seed + output_index) % 2**64,
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_k=params.top_k,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        min_p=params.min_p,
        repetition_penalty=(
            params.repetition_penalty if params.HasField("repetition_penalty") else 1.0
        ),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(sorted(params.logit_bias.items())),
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(dict.fromkeys(params.stop_token_ids)),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        grammar=params.structured.grammar if params.HasField("structured") else None,
    )
    if parsed.grammar == "":
        raise InvalidArgumentError(f"{field}.structured.grammar", "is not set")
    _require_number(f"{field}.temperature", parsed.temperature, 0, 100)
    _require_number(f"{field}.top_k", parsed.top_k, 0, vocab_size)
    _require_positive(f"{field}.top_p", parsed.top_p, 1)
    _require_number(f"{field}.min_p", parsed.min_p, 0, 1)
    _require_positive(f"{field}.repetition_penalty", parsed.repetition_penalty, 100)
    _require_number(f"{field}.presence_penalty", parsed.presence_penalty, -2, 2)
    _require_number(f"{field}.frequency_penalty", parsed.frequency_penalty, -2, 2)
    _require_number(f"{field}.min_tokens", parsed.min_tokens, 0, math.inf)
    _require_number(f"{field}.logprobs", parsed.logprobs or 0, 0, _MAX_LOGPROBS)
    _require_number(f"{field}.prompt_logprobs", parsed.prompt_logprobs or 0, 0, _MAX_LOGPROBS)
    _require_count(f"{field}.logit_bias", len(parsed.logit_bias), 0, _MAX_LOGIT_BIASES)
    _require_count(f"{field}.stop_token_ids", len(parsed.stop_token_ids), 0, MAX_STOP_TOKEN_IDS)
    for token_id, bias in parsed.logit_bias:
        _require_number(f"{field}.logit_bias", token_id, 0, vocab_size - 1)
        _require_number(f"{field}.logit_bias[{token_id}]", bias, -100, 100)
    for token_id in parsed.stop_token_ids:
        _require_number(f"{field}.stop_token_ids", token_id, 0, vocab_size - 1)
    return parsed


def _new_row_from_proto(new: worker_pb2.NewSequence, limits: Limits) -> NewRow:
    token_ids = unpack_int32(new.token_ids, "new_sequences.token_ids")
    block_ids = _blocks(new.block_ids, "new_sequences.block_ids", limits.num_blocks)
    num_tokens = len(token_ids)
    _require_number("new_sequences.row", new.row, 0, limits.max_num_seqs - 1)
    _require_count("new_sequences.token_ids", num_tokens, 1, limits.max_model_len - 1)
    _require_range("new_sequences.token_ids", token_ids, 0, limits.vocab_size - 1)
    _require_number("new_sequences.num_prompt_tokens", new.num_prompt_tokens, 1, num_tokens)
    _require_number("new_sequences.num_computed_tokens", new.num_computed_tokens, 0, num_tokens - 1)
    _require_number(
        "new_sequences.max_total_tokens",
        new.max_total_tokens,
        num_tokens + 1,
        limits.max_model_len,
    )
    _require_count(
        "new_sequences.block_ids",
        len(block_ids),
        -(-num_tokens // limits.block_size),
        limits.max_blocks_per_row,
    )
    if len(new.identity) not in {0, _IDENTITY_BYTES}:
        raise InvalidArgumentError(
            "new_sequences.identity",
            f"has {len(new.identity)} bytes; it must have {_IDENTITY_BYTES}, or none",
        )
    return NewRow(
        seq_id=new.seq_id,
        row=new.row,
        token_ids=token_ids,
        num_prompt_tokens=new.num_prompt_tokens,
        num_computed_tokens=new.num_computed_tokens,
        block_ids=block_ids,
        sampling=sampling_params_from_proto(new.sampling, new.output_index, limits.vocab_size),
        max_total_tokens=new.max_total_tokens,
        traceparent=new.traceparent,
        identity=new.identity,
    )


def _logprob_to_proto(logprob: TokenLogprob) -> worker_pb2.SampledLogprob:
    return worker_pb2.SampledLogprob(index=logprob.index, logprob=_token_logprob_to_proto(logprob))


def _prompt_logprobs_to_proto(scores: PromptLogprobs) -> worker_pb2.PromptLogprobs:
    return worker_pb2.PromptLogprobs(
        row=scores.row,
        position=scores.position,
        logprobs=map(_token_logprob_to_proto, scores.logprobs),
    )


def _token_logprob_to_proto(logprob: TokenLogprob) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(
        logprob=logprob.logprob,
        top_token_ids=logprob.top_token_ids.tolist(),
        top_logprobs=logprob.top_logprobs.tolist(),
    )


def host_blocks_to_read(message: worker_pb2.ReadKvRequest, limits: Limits) -> Int32Array:
    """Take int32[N] host blocks of this worker.

    Raises:
        InvalidArgumentError: There is no such block.
    """
    return _blocks(message.host_block_ids, "host_block_ids", limits.num_host_blocks)


def host_blocks_to_pull(
    message: worker_pb2.PullKvRequest, limits: Limits
) -> tuple[Int32Array, Int32Array]:
    """Take int32[N] host blocks of another worker, and as many distinct ones of this.

    Raises:
        InvalidArgumentError: This one has no such block, or the two do not fit together.
    """
    sources = unpack_int32(message.source_host_block_ids, "source_host_block_ids")
    targets = _blocks(message.host_block_ids, "host_block_ids", limits.num_host_blocks)
    _require_parallel("host_block_ids", targets, "source_host_block_ids", sources)
    _require_distinct("host_block_ids", targets)
    return sources, targets


def _rows(packed: bytes, field: str, limits: Limits) -> Int32Array:
    """Distinct rows."""
    rows = unpack_int32(packed, field)
    _require_range(field, rows, 0, limits.max_num_seqs - 1)
    _require_distinct(field, rows)
    return rows


def _blocks(packed: bytes, field: str, num_blocks: int) -> Int32Array:
    block_ids = unpack_int32(packed, field)
    _require_range(field, block_ids, 0, num_blocks - 1)
    return block_ids


def _labels(packed: bytes, num_blocks: int) -> npt.NDArray[np.uint8]:
    """uint8[num_blocks, 32]."""
    if len(packed) != LABEL_BYTES * num_blocks:
        raise InvalidArgumentError(
            "labels",
            f"has {len(packed)} bytes; it must have {LABEL_BYTES} for each of labelled_block_ids, "
            f"{num_blocks}",
        )
    return np.frombuffer(packed, np.uint8).reshape(num_blocks, LABEL_BYTES)


def _moves(
    commands: worker_pb2.KvCommands, kind: str, num_src_blocks: int, num_dst_blocks: int
) -> tuple[Int32Array, Int32Array]:
    """The source and target blocks of a kind of moves; targets are distinct."""
    src_name, dst_name = f"{kind}_src_block_ids", f"{kind}_dst_block_ids"
    src = _blocks(getattr(commands, src_name), f"kv_commands.{src_name}", num_src_blocks)
    dst = _blocks(getattr(commands, dst_name), f"kv_commands.{dst_name}", num_dst_blocks)
    _require_parallel(f"kv_commands.{dst_name}", dst, src_name, src)
    _require_distinct(f"kv_commands.{dst_name}", dst)
    return src, dst


def _require_parallel(field: str, values: Int32Array, other: str, others: Int32Array) -> None:
    if len(values) != len(others):
        raise InvalidArgumentError(
            field, f"has {len(values)} entries; it must have one for each of {other}, {len(others)}"
        )


def _require_range(field: str, values: Int32Array, least: int, most: int) -> None:
    if not values.size:  # most fields of most batches: numpy takes 20 µs to find that out
        return
    wrong = (values < least) | (values > most)
    if wrong.any():
        value = values[np.argmax(wrong)]
        raise InvalidArgumentError(field, f"has {value}; values must be in [{least}, {most}]")


def _require_distinct(field: str, values: Int32Array) -> None:
    if len(values) > 1:
        ordered = np.sort(values)
        twice = ordered[1:] == ordered[:-1]
        if twice.any():
            value = ordered[np.argmax(twice)]
            raise InvalidArgumentError(field, f"has {value} twice; each may occur once")


def _require_number(field: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # false for NaN
        raise InvalidArgumentError(field, f"is {value}; it must be in [{least}, {most}]")


def _require_positive(field: str, value: float, most: float) -> None:
    if not 0 < value <= most:  # false for NaN
        raise InvalidArgumentError(field, f"is {value}; it must be in (0, {most}]")


def _require_count(field: str, count: int, least: int, most: int) -> None:
    if not least <= count <= most:
        raise InvalidArgumentError(field, f"has {count} entries; it must have {least} to {most}")
