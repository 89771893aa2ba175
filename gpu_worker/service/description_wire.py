"""What a worker tells of itself, to protobuf: its limits, its state, and what it holds."""

from collections.abc import Iterable, Iterator
from typing import Final

from contract.lora import LoraAdapter
from contract.packing import pack_int32
from gpu_worker.memory.level import Level
from gpu_worker.service.holdings import HeldBlocks, HeldRow, Holdings
from gpu_worker.service.step_wire import token_logprob_to_proto
from gpu_worker.service.worker_info import WorkerInfo, WorkerState
from quire.v1 import common_pb2, worker_pb2

_LEVEL_TO_PROTO: Final = {
    None: common_pb2.MEMORY_LEVEL_UNSPECIFIED,
    Level.OK: common_pb2.MEMORY_LEVEL_OK,
    Level.WARNING: common_pb2.MEMORY_LEVEL_WARNING,
    Level.CRITICAL: common_pb2.MEMORY_LEVEL_CRITICAL,
}
_MAX_ROWS_BYTES = 512 * 1024
_MAX_LABELS = 24 * 1024
"""Of one part of the holdings."""


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
            adapters=adapters_to_proto(limits.adapters),
            directory=info.directory,
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
        max_num_blocks=info.max_num_blocks,
        min_num_blocks=0 if info.max_num_blocks is None else info.min_num_blocks,
        num_saturating_tokens=limits.num_saturating_tokens,
        host_is_device_memory=info.host_is_device_memory,
        can_unload=info.can_unload,
    )


def adapters_to_proto(adapters: Iterable[LoraAdapter]) -> list[common_pb2.LoraAdapter]:
    """Say which there are, in the order of their names."""
    return [
        common_pb2.LoraAdapter(name=each.name, digest=each.digest, directory=each.directory)
        for each in sorted(adapters, key=lambda each: each.name)
    ]


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
        memory_level=_LEVEL_TO_PROTO[state.memory_level],
        is_unloaded=state.is_unloaded,
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
    for first in range(0, len(holdings.pins), _MAX_LABELS):
        pins = holdings.pins[first : first + _MAX_LABELS]
        held_pins = worker_pb2.HeldPins(
            labels=b"".join(label for label, _ in pins), left_s=[left_s for _, left_s in pins]
        )
        yield worker_pb2.ReadHoldingsResponse(pins=held_pins)


def _held_row_to_proto(row: HeldRow) -> worker_pb2.HeldRow:
    return worker_pb2.HeldRow(
        identity=row.identity,
        token_ids=pack_int32(row.token_ids),
        num_computed_tokens=row.num_computed_tokens,
        block_ids=pack_int32(row.block_ids),
        has_stopped=row.has_stopped,
        had_logprobs=row.had_logprobs,
        note=row.note,
        logprobs=map(token_logprob_to_proto, row.logprobs),
    )
