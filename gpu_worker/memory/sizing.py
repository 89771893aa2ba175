"""Decides how many KV blocks fit the device, and how much of the host's memory KV may take."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from contract.limits import Limits
from contract.step import NewSequence, Plan, StepId
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.kv.host_pool import STAGING_BYTES
from gpu_worker.kv.layout import KvDtypes
from gpu_worker.models.config import ModelConfig
from gpu_worker.parallel.ranks import Ranks
from gpu_worker.sampling.params import SamplingParams
from gpu_worker.step.executor import Executor
from gpu_worker.step.graphs import DecodeGraphs
from gpu_worker.step.model_runner import Decoder
from gpu_worker.weights.json_fields import ModelError

_GIB = 1024**3
_DEFAULT_CPU_BYTES = _GIB
_CPU_SHARE = 0.5
_DEFAULT_HOST_BYTES = 4 * _GIB
_HOST_SHARE = 0.25
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class NoRoomError(ModelError):
    """The device, or the machine, has no memory for what was asked."""


def blocks_in(num_bytes: float, bytes_per_block: int) -> int:
    """How many blocks fit `num_bytes`.

    Raises:
        NoRoomError: none does.
    """
    if num_bytes < bytes_per_block:
        raise NoRoomError(
            f"KV memory is {max(num_bytes, 0) / _GIB:.3f} GiB; one block takes "
            f"{bytes_per_block / _GIB:.3f} GiB"
        )
    return int(num_bytes // bytes_per_block)


def free_cpu_kv_bytes() -> int:
    """KV memory on a CPU if nobody says how much: 1 GiB, or half of what is free if less."""
    return min(_DEFAULT_CPU_BYTES, int(available_bytes() * _CPU_SHARE))


def free_host_kv_bytes(device: torch.device) -> int:
    """Host memory for KV if nobody says how much.

    On a GPU 4 GiB, or a quarter of what is free if less: it is pinned, which takes it from all
    others. On a CPU none: what it would hold, the pool could hold in the same memory.
    """
    if device.type != "cuda":
        return 0
    return min(_DEFAULT_HOST_BYTES, int(available_bytes() * _HOST_SHARE))


def available_bytes() -> int:
    """Memory that this process may still take, as far as the system tells."""
    bounds = []
    if (available := _meminfo().get("MemAvailable")) is not None:
        bounds.append(available)
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.exists() and used.exists() and (most := limit.read_text().strip()) != "max":
        bounds.append(int(most) - int(used.read_text()) + _reclaimable_bytes())
    return min(bounds, default=2 * _DEFAULT_CPU_BYTES)


def device_available_bytes(device: torch.device) -> int:
    """Memory that the device has left; a CPU's is the process's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()


def device_total_bytes(device: torch.device) -> int:
    """Memory that the device has in all; a CPU's is what the machine lets the process have."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    bounds = []
    if (total := _meminfo().get("MemTotal")) is not None:
        bounds.append(total)
    limit = _CGROUP / "memory.max"
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        bounds.append(int(most))
    return min(bounds, default=2 * _DEFAULT_CPU_BYTES)


def _reclaimable_bytes() -> int:
    """Of what counts as used: files' pages that the system drops when somebody needs room.

    Those used lately that nobody maps are among them: else a cache that fills up would look like
    memory that gets short.
    """
    stat = _CGROUP / "memory.stat"
    lines = stat.read_text().splitlines() if stat.exists() else []
    numbers = {name: int(value) for name, value in (line.split(maxsplit=1) for line in lines)}
    unmapped = numbers.get("active_file", 0) - numbers.get("file_mapped", 0)
    return numbers.get("inactive_file", 0) + max(0, unmapped)


def _meminfo() -> dict[str, int]:
    """What the kernel tells of the machine's memory, in bytes."""
    if not _MEMINFO.exists():
        return {}
    fields = (line.split(":") for line in _MEMINFO.read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, value in fields}


def free_gpu_kv_bytes(
    model: Decoder,
    config: ModelConfig,
    limits: Limits,
    dtypes: KvDtypes,
    device: torch.device,
    utilization: float,
    ranks: Ranks | None = None,
    *,
    has_graphs: bool,
) -> int:
    """KV memory on a GPU: its share of the memory, less what the largest step takes beside it.

    Runs that step, with all `ranks` if the model is on several. `limits.num_blocks` is not looked
    at. With `has_graphs` it leaves room for them, too: theirs no other step can use.
    """
    profiled = _run_largest_step(model, config, limits, dtypes, device, ranks)
    if has_graphs:
        profiled += _run_largest_graph(model, config, limits, dtypes, device)
    free, total = torch.cuda.mem_get_info(device)
    # What is neither free nor torch's is the driver's, the libraries' and other processes'.
    others = total - free - torch.cuda.memory_reserved(device)
    return int(total * utilization) - others - profiled - STAGING_BYTES


def _run_largest_step(
    model: Decoder,
    config: ModelConfig,
    limits: Limits,
    dtypes: KvDtypes,
    device: torch.device,
    ranks: Ranks | None,
) -> int:
    """Most bytes that torch holds while that step runs, weights included."""
    step = largest_step(limits)
    num_blocks = sum(len(new.block_ids) for new in step.new_sequences)
    limits = replace(limits, num_blocks=num_blocks)
    pool = KvPool(config, num_blocks, limits.block_size, dtypes, device)
    torch.cuda.reset_peak_memory_stats(device)
    Executor(model, pool, limits, (), device, ranks=ranks).step(step)
    peak = torch.cuda.max_memory_allocated(device)
    del pool
    torch.cuda.empty_cache()
    return peak


def _run_largest_graph(
    model: Decoder, config: ModelConfig, limits: Limits, dtypes: KvDtypes, device: torch.device
) -> int:
    """Bytes that the graphs hold: what their largest takes, since all of them share it."""
    pool = KvPool(config, 1, limits.block_size, dtypes, device)
    last_token_ids = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        DecodeGraphs(model.forward, pool, limits, last_token_ids).rehearse()
    peak = torch.cuda.max_memory_allocated(device)
    del pool
    torch.cuda.empty_cache()
    return peak - before


def largest_step(limits: Limits) -> Plan:
    """A step with as many tokens as may be, over as many rows as may be, all of which sample.

    They sample by what takes most memory; their blocks are numbered from 0.
    """
    num_rows = limits.max_num_seqs
    # A sequence must have room for the token it samples.
    length = min(limits.max_num_batched_tokens // num_rows, limits.max_model_len - 1)
    blocks = np.arange(num_rows * -(-length // limits.block_size), dtype=np.int32)
    sampling = SamplingParams(seed=0, top_p=0.5, repetition_penalty=1.1, logprobs=1)
    return Plan(
        step_id=StepId(1),
        num_decodes=0,
        new_sequences=tuple(
            NewSequence(
                seq_id=row,
                row=row,
                token_ids=np.zeros(length, np.int32),
                num_prompt_tokens=length,
                num_computed_tokens=0,
                block_ids=block_ids,
                sampling=sampling,
                max_total_tokens=length + 1,
            )
            for row, block_ids in enumerate(blocks.reshape(num_rows, -1))
        ),
        chunk_rows=np.arange(num_rows, dtype=np.int32),
        chunk_lens=np.full(num_rows, length, np.int32),
    )
