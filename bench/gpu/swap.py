"""Compares swaps on a GPU with pinned memcpy, and measures how much they slow down decodes.

    python -m gpu.swap --json out.json    (in bench/, as gpu.sh does)

- `payload_over_memcpy`: as in `swap.py`.
- `decode_slowdown`: how much longer steps of 32 decodes take if each step also swaps the blocks of
  one sequence out and those of another in, at most about as many bytes as the link moves during a
  step. Steps with and without swaps take turns. The weights are random.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from harness.case import Results, arguments, main, write_json
from harness.turns import turns
from kv.memcpy import swap_over_memcpy
from make_model import SHAPES, write_shape

from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan
from contract.worker_limits import Limits
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.kv.host_pool import HostPool
from gpu_worker.models.registry import open_model
from gpu_worker.step.executor import Executor
from gpu_worker.step.graphs.cuda_graphs import CudaGraphs

_BLOCK_SIZE = 16
_ROUND_STEPS = 8


class DecodeLoop:
    """An executor whose rows all decode, and additional blocks to swap out and in."""

    def __init__(self, given: argparse.Namespace) -> None:
        device = torch.device(given.device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with tempfile.TemporaryDirectory() as directory:
            write_shape(Path(directory), SHAPES[given.shape])
            source = open_model(Path(directory), is_dummy=True)
            model = source.load(dtype, device, lambda _: None)
        length = given.context
        self.num_swapped = given.swapped_blocks
        per_row = length // _BLOCK_SIZE
        self.num_rows = given.num_rows
        first_free = self.num_rows * per_row
        num_blocks = first_free + 2 * self.num_swapped
        self.limits = Limits(
            max_num_seqs=self.num_rows,
            max_model_len=length,
            max_num_batched_tokens=max(512, self.num_rows),
            num_blocks=num_blocks,
            block_size=_BLOCK_SIZE,
            vocab_size=source.config.vocab_size,
            num_host_blocks=2 * self.num_swapped,
        )
        self.pool = KvPool(source.config, num_blocks, _BLOCK_SIZE, dtype, device)
        host_pool = HostPool(self.pool.blocks_as_bytes, self.limits.num_host_blocks)
        self.executor = Executor(model, self.pool, self.limits, (), device, host_pool=host_pool)
        if device.type == "cuda":
            self.executor.capture_decodes(CudaGraphs(device), lambda _: None)
        self._out = np.arange(first_free, first_free + self.num_swapped, dtype=np.int32)
        self._in = self._out + self.num_swapped
        self._host = np.arange(self.num_swapped, dtype=np.int32)
        self._step_id = 1
        self._begin(per_row)

    def _begin(self, per_row: int) -> None:
        rows = tuple(
            NewSequence(
                seq_id=row,
                row=row,
                token_ids=np.full(2, 5, np.int32),
                num_prompt_tokens=2,
                num_computed_tokens=0,
                block_ids=np.arange(row * per_row, (row + 1) * per_row, dtype=np.int32),
                sampling=SamplingParams(seed=0, temperature=0),
                max_total_tokens=self.limits.max_model_len,
            )
            for row in range(self.num_rows)
        )
        self.executor.step(
            Plan(
                self._step_id,
                0,
                new_sequences=rows,
                chunk_rows=np.arange(self.num_rows, dtype=np.int32),
                chunk_lens=np.full(self.num_rows, 2, np.int32),
            )
        )

    def step_s(self, *, swaps: bool) -> float:
        """Return the seconds per step of some steps, two in flight."""
        moves = {}
        if swaps:
            moves = {
                "swap_out_src_block_ids": self._out,
                "swap_out_dst_block_ids": self._host,
                "swap_in_src_block_ids": self._host + self.num_swapped,
                "swap_in_dst_block_ids": self._in,
            }
        started = time.perf_counter()
        launched = []
        for _ in range(_ROUND_STEPS):
            self._step_id += 1
            step = Plan(self._step_id, self.num_rows, **moves)
            launched.append(self.executor.launch(step))
            if len(launched) >= self.executor.max_in_flight:
                self.executor.collect(launched.pop(0))
        for each in launched:
            self.executor.collect(each)
        return (time.perf_counter() - started) / _ROUND_STEPS


def decode_slowdown(given: argparse.Namespace, num_rounds: int) -> dict[str, float]:
    """Return the median step times with and without swaps, their ratio minus one, and the rate."""
    loop = DecodeLoop(given)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for index, swaps in turns(seconds, num_rounds, warm_ups=1):
        step_s = loop.step_s(swaps=swaps)
        if index >= 0:
            seconds[swaps].append(step_s)
    without, beside = (statistics.median(seconds[swaps]) for swaps in (False, True))
    moved = 2 * loop.num_swapped * loop.pool.block_bytes
    return {
        "decode_ms": without * 1e3,
        "decode_while_swapping_ms": beside * 1e3,
        "decode_slowdown": beside / without - 1,
        "swapped_gb_s_beside": moved / beside / 1e9,
    }


def measure(given: argparse.Namespace) -> Results:
    num_rounds = 3 if given.quick else given.rounds
    with tempfile.TemporaryDirectory() as directory:
        write_shape(Path(directory), SHAPES[given.shape])
        config = open_model(Path(directory)).config
    device = torch.device(given.device)
    pool = KvPool(config, given.pool_blocks, _BLOCK_SIZE, torch.bfloat16, device)
    results = swap_over_memcpy(pool, num_rounds)
    del pool
    if given.json is not None:  # a call that is cut off keeps its measurements so far
        write_json(given.json, results)
    results |= decode_slowdown(given, num_rounds)
    for name, value in results.items():
        print(f"{name:<28} {value:10.4f}")
    return results


if __name__ == "__main__":
    parser = arguments(__doc__, quick="three rounds")
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="8B")
    add("--device", default="cuda:0")
    add("--num-rows", type=int, default=32, help="rows that decode")
    add("--context", type=int, default=1024, help="most tokens of a row")
    add("--swapped-blocks", type=int, default=24, help="blocks swapped out, and in, in each step")
    add("--pool-blocks", type=int, default=512, help="blocks for the comparison with memcpy")
    add("--rounds", type=int, default=20)
    main(parser.parse_args(), measure)
