"""What a worker says of itself when it is attached."""

import math

from contract.errors import InvalidArgumentError
from quire.v1 import worker_pb2
from scheduler_svc.domain import ModelInfo, WorkerInfo
from scheduler_svc.wire.adapters import adapter_from_proto

_MAX_NUM_SEQS = 2**16
_MAX_BLOCKS = 2**24
_MAX_BLOCK_SIZE = 2**16
_MAX_TOKENS = 2**32
"""The core keeps arrays of these sizes: what a worker says must not exhaust the scheduler."""


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
            adapters=tuple(
                adapter_from_proto(adapter, "worker.model.adapters")
                for adapter in message.model.adapters
            ),
            directory=message.model.directory,
        ),
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
        num_saturating_tokens=message.num_saturating_tokens or None,
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
        host_is_device_memory=message.host_is_device_memory,
        can_unload=message.can_unload,
    )
    _check_ranges(info)
    _check_together(info)
    return info


def _check_ranges(info: WorkerInfo) -> None:
    """Check that each number is in its range."""
    for field, value, least, most in (
        ("model.max_model_len", info.model.max_model_len, 1, 2**31 - 1),
        ("model.vocab_size", info.model.vocab_size, 1, 2**31 - 1),
        ("max_num_seqs", info.max_num_seqs, 1, _MAX_NUM_SEQS),
        ("max_num_batched_tokens", info.max_num_batched_tokens, 1, 2**31 - 1),
        ("num_saturating_tokens", info.num_saturating_tokens or 0, 0, info.max_num_batched_tokens),
        ("num_blocks", info.num_blocks, 1, _MAX_BLOCKS),
        ("max_num_blocks", _most_blocks(info), info.num_blocks, _MAX_BLOCKS),
        ("min_num_blocks", info.min_num_blocks, 1, info.num_blocks),
        ("num_host_blocks", info.num_host_blocks, 0, _MAX_BLOCKS),
        ("num_disk_blocks", info.num_disk_blocks, 0, _MAX_BLOCKS),
        ("block_size", info.block_size, 1, _MAX_BLOCK_SIZE),
    ):
        if not least <= value <= most:
            raise InvalidArgumentError(
                f"worker.{field}", f"is {value}; it must be in [{least}, {most}]"
            )
    for field, rate in (
        ("swap_bytes_per_s", info.swap_bytes_per_s),
        ("prefill_tokens_per_s", info.prefill_tokens_per_s),
        ("disk_bytes_per_s", info.disk_bytes_per_s),
    ):
        if not 0 <= rate < math.inf:  # false for NaN
            raise InvalidArgumentError(f"worker.{field}", f"is {rate}; it must be in [0, inf)")


def _check_together(info: WorkerInfo) -> None:
    """Check what numbers mean for each other."""
    for token_id in info.model.eos_token_ids:
        if token_id >= info.model.vocab_size:
            raise InvalidArgumentError(
                "worker.model.eos_token_ids",
                f"has {token_id}; ids must be in [0, {info.model.vocab_size})",
            )
    num_tokens = min(info.model.max_model_len, _most_blocks(info) * info.block_size)
    if info.max_num_seqs * num_tokens > _MAX_TOKENS:
        raise InvalidArgumentError(
            "worker.max_num_seqs",
            f"is {info.max_num_seqs}, of up to {num_tokens} tokens each; the product must be at"
            f" most {_MAX_TOKENS}",
        )
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


def _most_blocks(info: WorkerInfo) -> int:
    return info.num_blocks if info.max_num_blocks is None else info.max_num_blocks
