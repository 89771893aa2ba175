"""Measures swap bandwidth, disk bandwidth and prefill rate.

By these rates the scheduler decides whether a preempted sequence is swapped or recomputed. The
rates are measured once, while the model is loaded. While requests run, steps mix prompts with
decodes, and copies overlap with computation, so the times of these steps and copies would not show
the cost of a preemption.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan, StepId
from contract.worker_limits import Limits
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.kv.disk_pool import DiskPool
from gpu_worker.kv.host_pool import HostPool
from gpu_worker.loading.kv_tiers import LowerTiers
from gpu_worker.ranks.collectives import Ranks
from gpu_worker.settings import WorkerSettings
from gpu_worker.step.executor import Executor
from gpu_worker.weights.json_fields import ModelError

_SWAP_BYTES = 64 * 1024**2
_MAX_PREFILL_TOKENS = 512
_NUM_ROUNDS = 2
"""Swap and prefill are measured in this many rounds, because the first round also pays one-time
costs: page faults, kernel compilation."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates in `WorkerInfo`; 0: not measured."""

    swap_bytes_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    disk_bytes_per_s: float = 0.0


def measure_rates(
    settings: WorkerSettings, executor: Executor, limits: Limits, tiers: LowerTiers, pool: KvPool
) -> Rates:
    """Measure this rank's rates. The rank must have host blocks.

    Raises:
        ModelError: The disk does not return the stored blocks.
    """
    assert tiers.host_pool is not None
    disk_rate = 0.0
    swap_rate = swap_bytes_per_s(tiers.host_pool, pool)
    prefill_rate = prefill_tokens_per_s(executor, limits)
    if tiers.disk_pool is not None:
        try:
            disk_rate = disk_bytes_per_s(tiers.disk_pool, tiers.host_pool, pool)
        except OSError as error:
            raise ModelError(f"disk-kv-dir is {settings.disk_kv_dir}: {error}") from error
    return Rates(swap_rate, prefill_rate, disk_rate)


def rates_of_all(own: Rates, block_bytes: int, ranks: Ranks) -> tuple[Rates, int]:
    """Return the rates of all ranks together, and the bytes of a block, summed over all ranks.

    The slowest rank determines each rate. Workers on several devices have no disk tier, so there is
    no disk rate.
    """
    total_bytes = ranks.total(block_bytes)[0]
    blocks_per_s, prefill_tokens_per_s = ranks.least(
        own.swap_bytes_per_s / block_bytes, own.prefill_tokens_per_s
    )
    return Rates(blocks_per_s * total_bytes, prefill_tokens_per_s), int(total_bytes)


def swap_bytes_per_s(host_pool: HostPool, pool: KvPool) -> float:
    """Measure bytes per second between device and host, in the slower direction.

    Contents of host and device blocks are lost.
    """
    num_blocks = min(pool.num_blocks, host_pool.num_blocks)
    num_blocks = min(num_blocks, max(1, _SWAP_BYTES // pool.block_bytes))
    blocks = np.arange(num_blocks, dtype=np.int32)

    def swap_out() -> None:
        host_pool.swap_out(blocks, blocks)
        host_pool.synchronize()

    def swap_in() -> None:
        host_pool.begin_step()
        host_pool.swap_in(blocks, blocks)
        host_pool.synchronize()

    slowest_s = max(least_s(swap_out), least_s(swap_in))
    return num_blocks * pool.block_bytes / slowest_s


def disk_bytes_per_s(disk_pool: DiskPool, host_pool: HostPool, pool: KvPool) -> float:
    """Measure the bytes of KV per second that are loaded from the disk, not from the page cache.

    Contents of host and device blocks are lost.

    Raises:
        OSError: A stored block cannot be loaded.
    """
    num_blocks = min(pool.num_blocks, host_pool.num_blocks, disk_pool.num_blocks)
    num_blocks = min(num_blocks, max(1, _SWAP_BYTES // pool.block_bytes))
    blocks = np.arange(num_blocks, dtype=np.int32)
    pool.blocks_as_bytes[:num_blocks] = _random_blocks(num_blocks, pool)
    host_pool.swap_out(blocks, blocks)
    pool.blocks_as_bytes[:num_blocks] = 0
    host_pool.synchronize()
    scratch = disk_pool.scratch(num_blocks)
    disk_pool.store(blocks, scratch, step_id=0)
    disk_pool.synchronize()
    disk_pool.forget_cached_pages()
    start_s = time.perf_counter()
    disk_pool.load(scratch, blocks, step_id=0)
    disk_pool.synchronize()
    seconds = time.perf_counter() - start_s
    num_loaded = len(disk_pool.take_ended(step_id=0).loaded)
    if num_loaded < num_blocks:
        raise OSError(f"{num_loaded} of {num_blocks} KV blocks came back from the disk")
    return num_blocks * pool.block_bytes / seconds


def prefill_tokens_per_s(executor: Executor, limits: Limits) -> float:
    """Measure the tokens per second of a step with one prompt.

    All rows must be free before the call, and are free after it.
    """
    num_groups = len(limits.kv_windows)
    num_slots = limits.num_blocks // num_groups * limits.block_size
    room = min(limits.max_num_batched_tokens, num_slots)
    length = min(room, limits.max_model_len - 1, _MAX_PREFILL_TOKENS)
    row = NewSequence(
        seq_id=0,
        row=0,
        token_ids=np.zeros(length, np.int32),
        num_prompt_tokens=length,
        num_computed_tokens=0,
        block_ids=np.arange(-(-length // limits.block_size) * num_groups, dtype=np.int32),
        sampling=SamplingParams(seed=0),
        max_total_tokens=length + 1,
    )
    step = Plan(
        step_id=StepId(0),
        num_decodes=0,
        new_sequences=(row,),
        chunk_rows=np.zeros(1, np.int32),
        chunk_lens=np.full(1, length, np.int32),
    )

    def prefill() -> None:
        executor.step(step)
        executor.reset()

    return length / least_s(prefill)


def _random_blocks(num_blocks: int, pool: KvPool) -> torch.Tensor:
    """Make uint8[num_blocks, block_bytes] that compress about as well as KV.

    Zeros would compress far better. Quantized KV hardly compresses at all.
    """
    num_bytes = num_blocks * pool.block_bytes
    if pool.layout.is_quantized:
        return torch.randint(256, (num_bytes,), dtype=torch.uint8).view(num_blocks, -1)
    dtype = pool.layout.dtype
    numbers = torch.randn(num_bytes // dtype.itemsize).to(dtype)
    return numbers.view(torch.uint8).view(num_blocks, -1)


def least_s(work: Callable[[], object], num_rounds: int = _NUM_ROUNDS) -> float:
    """Call `work` `num_rounds` times; return the seconds of the fastest round."""
    durations_s = []
    for _ in range(num_rounds):
        start_s = time.perf_counter()
        work()
        durations_s.append(time.perf_counter() - start_s)
    return min(durations_s)
