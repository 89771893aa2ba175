"""Steps from protobuf and back; checks all that can be checked without the rows."""

from typing import Final

import numpy as np
import numpy.typing as npt

from contract.errors import InvalidArgumentError
from contract.packing import pack_int32, unpack_int32
from gpu_worker.service.field_checks import (
    require_count,
    require_distinct,
    require_number,
    require_parallel,
    require_positive,
    require_range,
    require_size,
)
from gpu_worker.service.sampling_wire import adapter_from_proto, sampling_params_from_proto
from gpu_worker.step.messages import (
    LABEL_BYTES,
    Int32Array,
    Limits,
    NewRow,
    PromptLogprobs,
    StepInput,
    StepOutput,
    TokenLogprob,
)
from quire.v1 import common_pb2, worker_pb2

_IDENTITY_BYTES = 32
_MAX_PIN_S = 10**6
_NOTE_BYTES_PER_TOKEN = 80
"""As in `quire.v1.NewSequence.note`, as the next."""
_NOTE_BYTES_BESIDES = 1024
_NONE: Final = unpack_int32(b"", "")
"""What most fields of most batches name; read-only, as all that is unpacked."""


def step_input_from_proto(batch: worker_pb2.StepBatch, limits: Limits) -> StepInput:
    """Parse a batch; its epoch is the caller's affair.

    Raises:
        InvalidArgumentError: names the field that is malformed or out of range.
    """
    appended_rows = _rows(batch.appended_rows, "appended_rows", limits)
    appended_block_ids = _blocks(batch.appended_block_ids, "appended_block_ids", limits.num_blocks)
    chunk_rows = _rows(batch.chunk_rows, "chunk_rows", limits)
    chunk_lens = unpack_int32(batch.chunk_lens, "chunk_lens")
    require_parallel("appended_block_ids", appended_block_ids, "appended_rows", appended_rows)
    require_parallel("chunk_lens", chunk_lens, "chunk_rows", chunk_rows)
    require_range("chunk_lens", chunk_lens, 1, limits.max_num_batched_tokens)
    device, host, disk = limits.num_blocks, limits.num_host_blocks, limits.num_disk_blocks
    copy_src, copy_dst = _moves(batch.kv_commands, "copy", device, device)
    out_src, out_dst = _moves(batch.kv_commands, "swap_out", device, host)
    in_src, in_dst = _moves(batch.kv_commands, "swap_in", host, device)
    store_src, store_dst = _moves(batch.kv_commands, "disk_store", host, disk)
    load_src, load_dst = _moves(batch.kv_commands, "disk_load", disk, host)
    renamed_src = _blocks(batch.renamed_src_block_ids, "renamed_src_block_ids", device)
    renamed_dst = _blocks(batch.renamed_dst_block_ids, "renamed_dst_block_ids", device)
    require_parallel("renamed_dst_block_ids", renamed_dst, "renamed_src_block_ids", renamed_src)
    require_distinct("renamed_src_block_ids", renamed_src)
    require_distinct("renamed_dst_block_ids", renamed_dst)
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
        labels=_labels(batch.labels, "labels", "labelled_block_ids", len(labelled)),
        pins=_pins(batch),
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


def _new_row_from_proto(new: worker_pb2.NewSequence, limits: Limits) -> NewRow:
    token_ids = unpack_int32(new.token_ids, "new_sequences.token_ids")
    block_ids = _blocks(new.block_ids, "new_sequences.block_ids", limits.num_blocks)
    num_tokens = len(token_ids)
    require_number("new_sequences.row", new.row, 0, limits.max_num_seqs - 1)
    require_count("new_sequences.token_ids", num_tokens, 1, limits.max_model_len - 1)
    require_range("new_sequences.token_ids", token_ids, 0, limits.vocab_size - 1)
    require_number("new_sequences.num_prompt_tokens", new.num_prompt_tokens, 1, num_tokens)
    require_number("new_sequences.num_computed_tokens", new.num_computed_tokens, 0, num_tokens - 1)
    require_number(
        "new_sequences.max_total_tokens",
        new.max_total_tokens,
        num_tokens + 1,
        limits.max_model_len,
    )
    require_count(
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
    most = _NOTE_BYTES_PER_TOKEN * limits.max_model_len + _NOTE_BYTES_BESIDES
    require_size("new_sequences.note", new.note, most)
    return NewRow(
        seq_id=new.seq_id,
        row=new.row,
        token_ids=token_ids,
        num_prompt_tokens=new.num_prompt_tokens,
        num_computed_tokens=new.num_computed_tokens,
        block_ids=block_ids,
        sampling=sampling_params_from_proto(
            new.sampling, new.output_index, limits.vocab_size, limits.max_model_len
        ),
        max_total_tokens=new.max_total_tokens,
        adapter=adapter_from_proto(new.sampling, limits.adapters),
        traceparent=new.traceparent,
        identity=new.identity,
        note=new.note,
    )


def _logprob_to_proto(logprob: TokenLogprob) -> worker_pb2.SampledLogprob:
    return worker_pb2.SampledLogprob(index=logprob.index, logprob=token_logprob_to_proto(logprob))


def _prompt_logprobs_to_proto(scores: PromptLogprobs) -> worker_pb2.PromptLogprobs:
    return worker_pb2.PromptLogprobs(
        row=scores.row,
        position=scores.position,
        logprobs=map(token_logprob_to_proto, scores.logprobs),
    )


def token_logprob_to_proto(logprob: TokenLogprob) -> common_pb2.TokenLogprob:
    """Build what is told of one token."""
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
    require_parallel("host_block_ids", targets, "source_host_block_ids", sources)
    require_distinct("host_block_ids", targets)
    return sources, targets


def _rows(packed: bytes, field: str, limits: Limits) -> Int32Array:
    """Distinct rows."""
    if not packed:
        return _NONE
    rows = unpack_int32(packed, field)
    require_range(field, rows, 0, limits.max_num_seqs - 1)
    require_distinct(field, rows)
    return rows


def _blocks(packed: bytes, field: str, num_blocks: int) -> Int32Array:
    if not packed:
        return _NONE
    block_ids = unpack_int32(packed, field)
    require_range(field, block_ids, 0, num_blocks - 1)
    return block_ids


def _labels(packed: bytes, field: str, other: str, count: int) -> npt.NDArray[np.uint8]:
    """uint8[count, 32]."""
    if len(packed) != LABEL_BYTES * count:
        raise InvalidArgumentError(
            field,
            f"has {len(packed)} bytes; it must have {LABEL_BYTES} for each of {other}, {count}",
        )
    return np.frombuffer(packed, np.uint8).reshape(count, LABEL_BYTES)


def _pins(batch: worker_pb2.StepBatch) -> tuple[tuple[bytes, float], ...]:
    if not (batch.pinned_labels or batch.pinned_s):  # as in almost every batch
        return ()
    labels = _labels(batch.pinned_labels, "pinned_labels", "pinned_s", len(batch.pinned_s))
    for seconds in batch.pinned_s:
        require_positive("pinned_s", seconds, _MAX_PIN_S)
    names = (label.tobytes() for label in labels)
    return tuple(zip(names, batch.pinned_s, strict=True))


def _moves(
    commands: worker_pb2.KvCommands, kind: str, num_src_blocks: int, num_dst_blocks: int
) -> tuple[Int32Array, Int32Array]:
    """The source and target blocks of a kind of moves; targets are distinct."""
    src_name, dst_name = f"{kind}_src_block_ids", f"{kind}_dst_block_ids"
    packed_src, packed_dst = getattr(commands, src_name), getattr(commands, dst_name)
    if not (packed_src or packed_dst):  # as in almost every batch
        return _NONE, _NONE
    src = _blocks(packed_src, f"kv_commands.{src_name}", num_src_blocks)
    dst = _blocks(packed_dst, f"kv_commands.{dst_name}", num_dst_blocks)
    require_parallel(f"kv_commands.{dst_name}", dst, src_name, src)
    require_distinct(f"kv_commands.{dst_name}", dst)
    return src, dst
