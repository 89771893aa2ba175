"""Measures a step of scheduling: the core's `schedule` and `update`, without model and messages.

    python bench/scheduler.py [--quick] [--json FILE] [--vllm-python PATH]

Costs are processor time, so that other work on the machine hardly counts. Sequences decode with
blocks of 16 tokens, so one in sixteen crosses a block boundary in each step. `growth` compares
1,024 with 64 running sequences when four cross a boundary in both cases. `two groups` compares a
model in which every other layer has a window with a model without windows, step by step in turns.
`further groups` compares eleven groups with two. `hash` is the prefix cache's cost per prompt
block. The goals are 0.14 us per sequence at 1,024 sequences, a `growth` of at most 2, and
`two groups` of at most 1.5.

With --vllm-python, an interpreter whose environment has vLLM, the benchmark times vLLM's scheduler
and hashing, too, each right after Quire's at the same size.
"""

import argparse
import contextlib
import statistics
import time
from pathlib import Path

import numpy as np
from harness.case import Results, Table, arguments, main
from harness.device import SimulatedWorker
from harness.processes import BENCH, Answerer

from contract.hashing import extend_chain, root_hash
from contract.step import Result
from contract.worker_limits import KvWindow
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.interface.request import Request, SeqKey, SourceId
from scheduler_svc.core.scheduler import Scheduler

SIZES = (64, 256, 1024, 4096)
WINDOW = 128
"""The window of all groups but the first, and the least length of a prompt: so each new block of
these groups frees an old one."""


class Decoding:
    """Sequences that decode, with lengths that are spread over a block."""

    def __init__(
        self,
        num_seqs: int,
        block_size: int,
        num_steps: int,
        kv_windows: tuple[KvWindow, ...] = (None,),
    ) -> None:
        """Compute all prompts, and leave room for `num_steps` tokens of each sequence."""
        max_len = 256 + num_steps + 2 * block_size
        self._core = Scheduler(
            SchedulerConfig(
                num_blocks=1 + num_seqs * (max_len // block_size + 2) * len(kv_windows),
                block_size=block_size,
                kv_windows=kv_windows,
                max_num_seqs=num_seqs,
                max_num_batched_tokens=max(num_seqs, 8192),
                max_model_len=max_len,
                max_waiting=num_seqs,
            )
        )
        rng = np.random.default_rng(0)
        for key in range(num_seqs):
            prompt = rng.integers(0, 32_000, 128 + key % block_size).astype(np.int32)
            request = Request(SourceId(0), SeqKey(key), "", prompt, 1, max_len - len(prompt), b"")
            self._core.submit(request, 0.0)
        worker = SimulatedWorker(num_seqs)
        while worker.num_decoding < num_seqs:
            plan = self._core.schedule(0.0)
            assert plan is not None
            self._core.update(worker.execute(plan))
        self._rows = np.arange(num_seqs, dtype=np.int32)
        self._token_ids = np.zeros(num_seqs, np.int32)

    def step_s(self) -> float:
        """Return the processor seconds of a step.

        Every row samples a token. No simulated worker runs between `schedule` and `update`: it
        would take the processor's caches from the scheduler.
        """
        start = time.thread_time()
        plan = self._core.schedule(0.0)
        scheduled = time.thread_time()
        assert plan is not None
        assert plan.num_decodes == len(self._rows)
        result = Result(plan.step_id, self._rows, self._token_ids)
        received = time.thread_time()
        self._core.update(result)
        return time.thread_time() - received + scheduled - start


def step_us(num_seqs: int, block_size: int, num_steps: int) -> float:
    """Return the median microseconds of a step in which `num_seqs` sequences decode.

    Their lengths are spread over a block.
    """
    decoding = Decoding(num_seqs, block_size, num_steps)
    return statistics.median(decoding.step_s() for _ in range(num_steps)) * 1e6


def groups_us(
    few: int, many: int, num_seqs: int, block_size: int, num_steps: int
) -> tuple[float, float]:
    """Return the median microseconds of a step with `few` KV groups and with `many`.

    All groups but the first have a window.
    """
    decoding = [
        Decoding(num_seqs, block_size, num_steps, (None, *[WINDOW] * (num_groups - 1)))
        for num_groups in (few, many)
    ]
    costs_s = [(one.step_s(), other.step_s()) for one, other in [decoding] * num_steps]
    of_few, of_many = (statistics.median(costs) * 1e6 for costs in zip(*costs_s, strict=True))
    return of_few, of_many


def hash_us_per_block(num_blocks: int = 512, block_size: int = 16) -> float:
    """Return the microseconds per block of hashing a prompt: the least of 50 prompts."""
    prompts = np.random.default_rng(0).integers(0, 32_000, (50, num_blocks * block_size), np.int32)
    costs_s = []
    for prompt in prompts:
        start = time.thread_time()
        extend_chain([], root_hash(""), prompt, block_size)
        costs_s.append(time.thread_time() - start)
    return min(costs_s) / num_blocks * 1e6


def measure(given: argparse.Namespace) -> Results:
    num_steps = 200 if given.quick else 2000
    results: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        vllm = None
        if given.vllm_python is not None:
            script = BENCH / "engines" / "vllm_scheduler.py"
            vllm = stack.enter_context(Answerer(str(given.vllm_python), str(script)))
        columns = ("running:,d", "us per step:.1f", "us per sequence:.3f")
        table = Table(*columns, *(("vLLM:.2f", "ratio:.1f") if vllm else ()))
        for size in SIZES:
            results[f"us_per_seq_{size}"] = cost = step_us(size, 16, num_steps) / size
            theirs = []
            if vllm:
                other = vllm.ask([size, num_steps]) / size
                results[f"us_per_seq_vllm_{size}"] = other
                theirs = [other, other / cost]
            table.row(size, cost * size, cost, *theirs)
        # four boundaries crossed in every step: 64 / 16 and 1024 / 256
        few, many = step_us(64, 16, num_steps), step_us(1024, 256, num_steps)
        results["growth_1024_over_64"] = many / few
        print("growth, 1,024 over 64 with four borders each:", end=" ")
        print(f"{many:.1f} / {few:.1f} = {many / few:.2f}")
        one, two = groups_us(1, 2, 1024, 16, num_steps)
        results["two_groups_over_one"] = two / one
        print(f"two groups, over one: {two:.1f} / {one:.1f} = {two / one:.2f}")
        two, eleven = groups_us(2, 11, 1024, 16, num_steps)
        results["us_per_further_group"] = cost = (eleven - two) / 9
        print(f"further groups, each: ({eleven:.1f} - {two:.1f}) / 9 = {cost:.1f} us")
        results["hash_us_per_block"] = cost = hash_us_per_block()
        print(f"hash: {cost:.3f} us per block of 16 tokens", end="")
        if vllm:
            results["hash_us_per_block_vllm"] = other = vllm.ask("hash")
            print(f"; vLLM {other:.3f}; ratio {other / cost:.1f}", end="")
        print()
    return results


if __name__ == "__main__":
    parser = arguments(__doc__, quick="fewer steps; under 20 s without vLLM")
    parser.add_argument("--vllm-python", type=Path, metavar="PATH", help="compare with its vLLM")
    main(parser.parse_args(), measure)
