"""Converts descriptions of workers and models to protobuf and back."""

import math
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, Final

from contract.codec.message_checks import check_number
from contract.codec.sampling import pooling_from_proto, pooling_to_proto
from contract.errors import InvalidArgumentError
from contract.info import MemoryLevel, ModelInfo, Role, WorkerInfo
from contract.lora import DIGEST_BYTES, LoraAdapter
from contract.pooling import Abilities, Task
from contract.worker_limits import Chunk, KvWindow, Limits
from quire.v1 import common_pb2, worker_pb2

_LIMITS: Final = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_blocks",
    "block_size",
    "num_host_blocks",
    "num_disk_blocks",
    "min_prompt_tokens",
)
_COPIED: Final = (
    "worker_id",
    "device",
    "block_bytes",
    "dtype",
    "swap_bytes_per_s",
    "prefill_tokens_per_s",
    "disk_bytes_per_s",
    "instance_id",
    "takes_kv",
    "num_draft_tokens",
    "host_is_device_memory",
    "can_unload",
    "takes_whole_prompts",
    "has_far_kv",
)
"""Fields that have the same names in `WorkerInfo` and in its message. `_LIMITS` lists the fields of
`Limits`."""
_limits, _copied = attrgetter(*_LIMITS), attrgetter(*_COPIED)
_LEVEL_TO_PROTO: Final = {
    MemoryLevel.OK: common_pb2.MEMORY_LEVEL_OK,
    MemoryLevel.WARNING: common_pb2.MEMORY_LEVEL_WARNING,
    MemoryLevel.CRITICAL: common_pb2.MEMORY_LEVEL_CRITICAL,
}
TASK_TO_PROTO: Final = {
    Task.GENERATE: common_pb2.TASK_GENERATE,
    Task.EMBED: common_pb2.TASK_EMBED,
    Task.SCORE: common_pb2.TASK_SCORE,
}
_ROLE_TO_PROTO: Final = {
    Role.BOTH: worker_pb2.WORKER_ROLE_UNSPECIFIED,
    Role.PREFILL: worker_pb2.WORKER_ROLE_PREFILL,
    Role.DECODE: worker_pb2.WORKER_ROLE_DECODE,
}
_ROLE_FROM_PROTO: Final = {number: role for role, number in _ROLE_TO_PROTO.items()}
_TASK_FROM_PROTO: Final = {number: task for task, number in TASK_TO_PROTO.items()}
_LEVEL_FROM_PROTO: Final = {number: level for level, number in _LEVEL_TO_PROTO.items()}

_MAX_NUM_SEQS: Final = 2**16
_MAX_BLOCKS: Final = 2**24
_MAX_BLOCK_SIZE: Final = 2**16
_MAX_KV_GROUPS: Final = 2**8  # a block's hash has one byte for the KV group
MAX_EMBEDDING_SIZE: Final = 2**20
_MAX_TOKENS: Final = 2**32
# The scheduler allocates arrays of these sizes; a wrong report must not exhaust its memory.


def worker_info_to_proto(info: WorkerInfo) -> worker_pb2.WorkerInfo:
    """Convert a worker's description of itself, which is the worker's answer to `Attach`."""
    return worker_pb2.WorkerInfo(
        **dict(zip(_COPIED, _copied(info), strict=True)),
        **dict(zip(_LIMITS, _limits(info.limits), strict=True)),
        model=model_info_to_proto(info.model),
        max_num_blocks=info.max_num_blocks,
        min_num_blocks=0 if info.max_num_blocks is None else info.min_num_blocks,
        num_saturating_tokens=info.limits.num_saturating_tokens,
        kv_windows=_plain(info.limits.kv_windows),
        kv_chunks=_chunks(info.limits.kv_windows),
        role=_ROLE_TO_PROTO[info.role],
    )


def worker_info_from_proto(message: worker_pb2.WorkerInfo) -> WorkerInfo:
    """Parse a worker's description of itself.

    Raises:
        InvalidArgumentError: A field is malformed, or a number is out of its range.
    """
    model = model_info_from_proto(message.model, "worker.model")
    info = WorkerInfo(
        **dict(zip(_COPIED, _copied(message), strict=True)),
        model_id=model.id,
        eos_token_ids=model.eos_token_ids,
        structured_output=model.structured_output,
        directory=model.directory,
        abilities=model.abilities,
        limits=Limits(
            **dict(zip(_LIMITS, _limits(message), strict=True)),
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            kv_windows=_windows_from_proto(message),
            adapters={adapter: number for number, adapter in enumerate(model.adapters, start=1)},
            num_saturating_tokens=message.num_saturating_tokens or None,
        ),
        max_num_blocks=message.max_num_blocks if message.HasField("max_num_blocks") else None,
        min_num_blocks=message.min_num_blocks or 1,
        role=_ROLE_FROM_PROTO.get(message.role, Role.BOTH),
    )
    _check_ranges(info)
    _check_together(info)
    return info


def model_info_to_proto(model: ModelInfo) -> common_pb2.ModelInfo:
    return common_pb2.ModelInfo(
        id=model.id,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        structured_output=model.structured_output,
        adapters=adapters_to_proto(model.adapters),
        directory=model.directory,
        **abilities_to_proto(model.abilities),
    )


def model_info_from_proto(message: common_pb2.ModelInfo, field: str) -> ModelInfo:
    """Parse the description of a model; `field` names the description in error messages.

    Raises:
        InvalidArgumentError: An adapter has no name or a digest of the wrong length, or this
            version does not know the kind of pooling.
    """
    return ModelInfo(
        id=message.id,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        eos_token_ids=tuple(message.eos_token_ids),
        structured_output=message.structured_output,
        adapters=tuple(adapter_from_worker(each, f"{field}.adapters") for each in message.adapters),
        directory=message.directory,
        abilities=abilities_from_proto(message),
    )


def abilities_to_proto(abilities: Abilities) -> dict[str, Any]:
    """Convert `abilities` to keyword arguments for a `ModelInfo` message."""
    pooling = abilities.pooling
    return {
        "tasks": map(TASK_TO_PROTO.__getitem__, abilities.tasks),
        "embedding_size": abilities.embedding_size,
        "pooling": None if pooling is None else pooling_to_proto(pooling),
    }


def abilities_from_proto(message: common_pb2.ModelInfo) -> Abilities:
    """Parse what a model can do; tasks that this version of Quire does not know are left out."""
    tasks = tuple(_TASK_FROM_PROTO[each] for each in message.tasks if each in _TASK_FROM_PROTO)
    return Abilities(
        tasks or (Task.GENERATE,),
        message.embedding_size,
        pooling_from_proto(message.pooling) if message.HasField("pooling") else None,
    )


def adapters_to_proto(adapters: Iterable[LoraAdapter]) -> list[common_pb2.LoraAdapter]:
    """Convert adapters, in the order of their names."""
    return [adapter_to_proto(each) for each in sorted(adapters, key=lambda each: each.name)]


def adapter_to_proto(adapter: LoraAdapter) -> common_pb2.LoraAdapter:
    return common_pb2.LoraAdapter(
        name=adapter.name, digest=adapter.digest, directory=adapter.directory
    )


def adapter_from_worker(message: common_pb2.LoraAdapter, field: str) -> LoraAdapter:
    """Parse a worker's description of an adapter; `field` names the description in error messages.

    Raises:
        InvalidArgumentError: The name is empty, or the digest has the wrong length.
    """
    if not message.name or len(message.digest) != DIGEST_BYTES:
        raise InvalidArgumentError(
            field,
            f"has {message.name!r} with a digest of {len(message.digest)} bytes; each must have a"
            f" name and {DIGEST_BYTES} bytes",
        )
    return LoraAdapter(message.name, message.digest, message.directory)


def memory_level_to_proto(level: MemoryLevel | None) -> common_pb2.MemoryLevel:
    """Convert a level; a worker that does not watch its memory has the level None."""
    return common_pb2.MEMORY_LEVEL_UNSPECIFIED if level is None else _LEVEL_TO_PROTO[level]


def memory_level_from_proto(number: common_pb2.MemoryLevel) -> MemoryLevel:
    """Convert an enum value; an unset or unknown value becomes `OK`."""
    return _LEVEL_FROM_PROTO.get(number, MemoryLevel.OK)


def _plain(windows: tuple[KvWindow, ...]) -> list[int]:
    if windows == (None,):
        return []
    return [0 if isinstance(window, Chunk) else window or 0 for window in windows]


def _chunks(windows: tuple[KvWindow, ...]) -> list[int]:
    chunks = [window.num_tokens if isinstance(window, Chunk) else 0 for window in windows]
    return chunks if any(chunks) else []


def _windows_from_proto(message: worker_pb2.WorkerInfo) -> tuple[KvWindow, ...]:
    windows: list[KvWindow] = [window or None for window in message.kv_windows]
    chunks = message.kv_chunks or [0] * len(windows)
    if len(chunks) != len(windows):
        raise InvalidArgumentError(
            "worker.kv_chunks", f"has {len(chunks)} entries; kv_windows has {len(windows)}"
        )
    pairs = zip(windows, chunks, strict=True)
    return tuple(Chunk(chunk) if chunk else window for window, chunk in pairs) or (None,)


def _check_ranges(info: WorkerInfo) -> None:
    limits = info.limits
    most_blocks = _most_blocks(info)
    for field, value, least, most in (
        ("model.max_model_len", limits.max_model_len, 1, 2**31 - 1),
        ("model.vocab_size", limits.vocab_size, 1, 2**31 - 1),
        ("max_num_seqs", limits.max_num_seqs, 1, _MAX_NUM_SEQS),
        ("max_num_batched_tokens", limits.max_num_batched_tokens, 1, 2**31 - 1),
        (
            "num_saturating_tokens",
            limits.num_saturating_tokens or 0,
            0,
            limits.max_num_batched_tokens,
        ),
        ("min_prompt_tokens", limits.min_prompt_tokens, 0, limits.max_num_batched_tokens),
        ("num_blocks", limits.num_blocks, 1, _MAX_BLOCKS),
        ("max_num_blocks", most_blocks, limits.num_blocks, _MAX_BLOCKS),
        ("min_num_blocks", info.min_num_blocks, 1, limits.num_blocks),
        ("num_host_blocks", limits.num_host_blocks, 0, _MAX_BLOCKS),
        ("num_disk_blocks", limits.num_disk_blocks, 0, _MAX_BLOCKS),
        ("block_size", limits.block_size, 1, _MAX_BLOCK_SIZE),
        ("kv_windows", len(limits.kv_windows), 1, _MAX_KV_GROUPS),
        ("model.embedding_size", info.abilities.embedding_size, 0, MAX_EMBEDDING_SIZE),
    ):
        check_number(f"worker.{field}", value, least, most)
    for field in ("swap_bytes_per_s", "prefill_tokens_per_s", "disk_bytes_per_s"):
        if not 0 <= (rate := getattr(info, field)) < math.inf:  # false for NaN
            raise InvalidArgumentError(f"worker.{field}", f"is {rate}; it must be in [0, inf)")


def _check_together(info: WorkerInfo) -> None:
    limits = info.limits
    for token_id in info.eos_token_ids:
        if token_id >= limits.vocab_size:
            raise InvalidArgumentError(
                "worker.model.eos_token_ids",
                f"has {token_id}; ids must be in [0, {limits.vocab_size})",
            )
    num_tokens = limits.max_model_len
    if not limits.has_windows:
        num_tokens = min(num_tokens, _most_blocks(info) * limits.block_size)
    if limits.max_num_seqs * num_tokens > _MAX_TOKENS:
        raise InvalidArgumentError(
            "worker.max_num_seqs",
            f"is {limits.max_num_seqs}, of up to {num_tokens} tokens each; the product must be at"
            f" most {_MAX_TOKENS}",
        )
    if limits.max_num_batched_tokens < limits.max_num_seqs:
        raise InvalidArgumentError(
            "worker.max_num_batched_tokens",
            f"is {limits.max_num_batched_tokens}; it must be at least max_num_seqs,"
            f" {limits.max_num_seqs}",
        )
    if info.takes_whole_prompts and limits.max_num_batched_tokens < limits.max_model_len - 1:
        raise InvalidArgumentError(
            "worker.max_num_batched_tokens",
            f"is {limits.max_num_batched_tokens}; a worker that takes whole prompts must have at"
            f" least max_model_len - 1, {limits.max_model_len - 1}",
        )
    if info.num_draft_tokens >= limits.block_size:
        raise InvalidArgumentError(
            "worker.num_draft_tokens",
            f"is {info.num_draft_tokens}; it must be less than block_size, {limits.block_size}",
        )
    if info.takes_kv and not info.instance_id:
        raise InvalidArgumentError(
            "worker.instance_id", "is 0; it must not be 0 if the worker takes KV"
        )


def _most_blocks(info: WorkerInfo) -> int:
    return info.limits.num_blocks if info.max_num_blocks is None else info.max_num_blocks
