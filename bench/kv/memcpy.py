"""Compares the time of swaps of KV blocks with that of plain copies of as many bytes."""

import random
import time
from collections.abc import Callable

import numpy as np
import torch
from harness.turns import turns

from contract.arrays import Int32Array
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.kv.host_pool import HostPool


def swap_over_memcpy(pool: KvPool, num_rounds: int) -> dict[str, float]:
    """In turn, swap blocks and copy as many bytes in one piece; return GB/s and ratios."""
    num_blocks = pool.num_blocks // 2
    host_pool = HostPool(pool.blocks_as_bytes, num_blocks)
    is_gpu = pool.device.type == "cuda"
    device = pool.blocks_as_bytes[:num_blocks]
    host = torch.zeros(device.shape, dtype=torch.uint8, pin_memory=is_gpu)
    hosts = np.arange(num_blocks, dtype=np.int32)
    scattered = np.array(random.Random(0).sample(range(pool.num_blocks), num_blocks), np.int32)

    def swap_out(blocks: Int32Array) -> Callable[[], None]:
        return lambda: host_pool.swap_out(blocks, hosts)

    def swap_in(blocks: Int32Array) -> Callable[[], None]:
        def work() -> None:
            host_pool.swap_in(hosts, blocks)
            host_pool.begin_step()

        return work

    def copy(source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        if is_gpu:
            return lambda: target.copy_(source, non_blocking=True)
        return lambda: np.copyto(target.numpy(), source.numpy())

    works = {
        "memcpy out": copy(device, host),
        "memcpy in": copy(host, device),
        "one run out": swap_out(hosts),
        "one run in": swap_in(hosts),
        "scattered out": swap_out(scattered),
        "scattered in": swap_in(scattered),
    }

    def timed(work: Callable[[], None]) -> float:
        start_s = time.perf_counter()
        work()
        host_pool.synchronize()
        if is_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start_s

    best_s = dict.fromkeys(works, float("inf"))
    for _, name in turns(works, num_rounds):
        best_s[name] = min(best_s[name], timed(works[name]))
    num_bytes = num_blocks * pool.block_bytes
    result = {
        f"{name.replace(' ', '_')}_gb_s": num_bytes / seconds / 1e9
        for name, seconds in best_s.items()
    }
    for kind in ("one run", "scattered"):
        ratios = (best_s[f"memcpy {way}"] / best_s[f"{kind} {way}"] for way in ("out", "in"))
        result[f"{kind.replace(' ', '_')}_over_memcpy"] = min(ratios)
    return result | {"payload_over_memcpy": result["scattered_over_memcpy"]}
