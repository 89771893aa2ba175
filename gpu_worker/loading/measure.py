"""Measures what the scheduler weighs swapping against recomputing by.

Measured once, at the start: the steps of a worker in use mix prompts with decodes, and the copies
overlap with computation, so neither would say what a preemption costs.
"""

import time
from collections.abc import Callable

import numpy as np
import torch

from contract.sampling import SamplingParams
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.kv.disk_pool import DiskPool
from gpu_worker.kv.host_pool import HostPool
from gpu_worker.step.executor import Executor
from gpu_worker.step.messages import Limits, NewRow, StepInput

_SWAP_BYTES = 64 * 1024**2
_MAX_PREFILL_TOKENS = 512
_NUM_ROUNDS = 2
"""The first also pays for what is done once: pages, kernels to compile."""


def swap_bytes_per_s(host_pool: HostPool, pool: KvPool) -> float:
    """Bytes per second between device and host, in the slower direction; contents are lost."""
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
    """Bytes of KV per second from the disk itself, not from the system's memory.

    Contents of host and device are lost.

    Raises:
        OSError: what was stored cannot be loaded.
    """
    num_blocks = min(pool.num_blocks, host_pool.num_blocks, disk_pool.num_blocks)
    num_blocks = min(num_blocks, max(1, _SWAP_BYTES // pool.block_bytes))
    blocks = np.arange(num_blocks, dtype=np.int32)
    pool.blocks_as_bytes[:num_blocks] = _random_blocks(num_blocks, pool)
    host_pool.swap_out(blocks, blocks)
    pool.blocks_as_bytes[:num_blocks] = 0
    host_pool.synchronize()
    disk_pool.store(blocks, blocks, step_id=0)
    disk_pool.synchronize()
    disk_pool.forget_cached_pages()
    start_s = time.perf_counter()
    disk_pool.load(blocks, blocks, step_id=0)
    disk_pool.synchronize()
    seconds = time.perf_counter() - start_s
    num_loaded = len(disk_pool.take_ended(step_id=0).loaded)
    if num_loaded < num_blocks:
        raise OSError(f"{num_loaded} of {num_blocks} KV blocks came back from the disk")
    return num_blocks * pool.block_bytes / seconds


def prefill_tokens_per_s(executor: Executor, limits: Limits) -> float:
    """Tokens per second of computing one prompt; all rows are free before and after."""
    room = min(limits.max_num_batched_tokens, limits.num_blocks * limits.block_size)
    length = min(room, limits.max_model_len - 1, _MAX_PREFILL_TOKENS)
    row = NewRow(
        seq_id=0,
        row=0,
        token_ids=np.zeros(length, np.int32),
        num_prompt_tokens=length,
        num_computed_tokens=0,
        block_ids=np.arange(-(-length // limits.block_size), dtype=np.int32),
        sampling=SamplingParams(seed=0),
        max_total_tokens=length + 1,
    )
    step = StepInput(
        step_id=0,
        num_decodes=0,
        new_rows=(row,),
        chunk_rows=np.zeros(1, np.int32),
        chunk_lens=np.full(1, length, np.int32),
    )

    def prefill() -> None:
        executor.step(step)
        executor.reset()

    return length / least_s(prefill)


def _random_blocks(num_blocks: int, pool: KvPool) -> torch.Tensor:
    """uint8[num_blocks, block_bytes] in which a codec finds about what it finds in KV.

    In zeros it would find far more, and in quantized KV it finds next to nothing.
    """
    num_bytes = num_blocks * pool.block_bytes
    if pool.layout.is_quantized:
        return torch.randint(256, (num_bytes,), dtype=torch.uint8).view(num_blocks, -1)
    dtype = pool.layout.dtypes[0]
    numbers = torch.randn(num_bytes // dtype.itemsize).to(dtype)
    return numbers.view(torch.uint8).view(num_blocks, -1)


def least_s(work: Callable[[], object], num_rounds: int = _NUM_ROUNDS) -> float:
    """How long the fastest of several rounds takes."""
    durations_s = []
    for _ in range(num_rounds):
        start_s = time.perf_counter()
        work()
        durations_s.append(time.perf_counter() - start_s)
    return min(durations_s)
