"""What one step of scheduling costs: `schedule` + `update` of the core, no model, no wire.

Costs are processor time, so that other work on the machine hardly counts. Sequences decode with
blocks of 16 tokens, so one in sixteen crosses a block border in each step. `growth` compares 1,024
with 64 running sequences when equally many (four) cross one. `hash` is the prefix cache's cost per
prompt block. Goals: 0.14 us per sequence at 1,024; growth at most 2.

With the interpreter of an environment that has vLLM, its scheduler is timed at the same sizes, each
right after ours, and its hashing.

    python bench/scheduler.py [--quick] [--json FILE] [--vllm-python PATH]
"""

import argparse
import json
import statistics
import subprocess
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE

import numpy as np

from contract.hashing import extend_chain, root_hash
from contract.step import Plan, Result
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.request import Request, SeqKey, SourceId
from scheduler_svc.core.scheduler import Scheduler

SIZES = (64, 256, 1024, 4096)
NOTHING = np.array([], np.int32)


class InstantWorker:
    """Samples token 1 for every row that a plan lets sample."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}  # known tokens still to compute, by row
        self._decoding = NOTHING

    @property
    def num_decoding(self) -> int:
        """Rows that decode."""
        return len(self._decoding)

    def execute(self, plan: Plan) -> Result:
        """Answer a plan; sequences here never end."""
        if len(plan.chunk_rows):
            for new in plan.new_sequences:
                self._left[new.row] = len(new.token_ids) - new.num_computed_tokens
            for row, length in zip(plan.chunk_rows.tolist(), plan.chunk_lens.tolist(), strict=True):
                self._left[row] -= length
            done = [row for row in plan.chunk_rows.tolist() if not self._left[row]]
            self._decoding = np.concatenate([self._decoding, np.array(done, np.int32)])
        tokens = np.ones(len(self._decoding), np.int32)
        return Result(plan.step_id, self._decoding, tokens, NOTHING, NOTHING)


def step_us(num_seqs: int, block_size: int, num_steps: int) -> float:
    """Median microseconds of a step in which `num_seqs` sequences decode, spread over a block."""
    max_len = 256 + num_steps + 2 * block_size
    core = Scheduler(
        SchedulerConfig(
            num_blocks=num_seqs * (max_len // block_size + 2),
            block_size=block_size,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=max(num_seqs, 8192),
            max_model_len=max_len,
            max_waiting=num_seqs,
        )
    )
    rng = np.random.default_rng(0)
    for key in range(num_seqs):
        prompt = rng.integers(0, 32_000, 128 + key % block_size).astype(np.int32)
        max_tokens = max_len - len(prompt)
        core.submit(Request(SourceId(0), SeqKey(key), "", prompt, 1, max_tokens, b""), 0.0)
    worker = InstantWorker()
    while worker.num_decoding < num_seqs:
        plan = core.schedule(0.0)
        assert plan is not None
        core.update(worker.execute(plan))
    costs_s = []
    for _ in range(num_steps):
        start = time.thread_time()
        plan = core.schedule(0.0)
        assert plan is not None
        scheduled = time.thread_time()
        outcome = worker.execute(plan)
        executed = time.thread_time()
        core.update(outcome)
        costs_s.append(time.thread_time() - executed + scheduled - start)
    assert core.load().num_preemptions == 0
    return statistics.median(costs_s) * 1e6


def hash_us_per_block(num_blocks: int = 512, block_size: int = 16) -> float:
    """Least microseconds per block of hashing a prompt, of 50 prompts."""
    prompts = np.random.default_rng(0).integers(0, 32_000, (50, num_blocks * block_size), np.int32)
    costs_s = []
    for prompt in prompts:
        start = time.thread_time()
        extend_chain([], root_hash(""), prompt, block_size)
        costs_s.append(time.thread_time() - start)
    return min(costs_s) / num_blocks * 1e6


class Vllm:
    """vLLM's scheduler in another interpreter; answers microseconds."""

    def __init__(self, python: Path) -> None:
        script = Path(__file__).with_name("vllm_scheduler.py")
        self._command = [str(python), str(script)]
        self._process = subprocess.Popen(
            self._command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True, bufsize=1
        )

    def ask(self, question: str) -> float:
        """Return the answer to a line.

        Raises:
            RuntimeError: The other process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(question + "\n")
        if not (answer := self._process.stdout.readline()):
            raise RuntimeError(f"no answer; try: echo {question} | {' '.join(self._command)}")
        return float(answer)

    def close(self) -> None:
        """Let it end."""
        self._process.communicate()


def measure(num_steps: int, vllm: Vllm | None) -> dict[str, float]:
    """Measure and print a table; return names to numbers."""
    results: dict[str, float] = {}
    print(f"{'running':>8} {'us per step':>12} {'us per sequence':>16}", end="")
    print(f" {'vLLM':>8} {'ratio':>7}" if vllm else "")
    for size in SIZES:
        results[f"us_per_seq_{size}"] = cost = step_us(size, 16, num_steps) / size
        print(f"{size:8,} {cost * size:12.1f} {cost:16.3f}", end="", flush=True)
        if vllm:
            results[f"us_per_seq_vllm_{size}"] = other = vllm.ask(f"{size} {num_steps}") / size
            print(f" {other:8.2f} {other / cost:7.1f}", end="")
        print()
    # four borders crossed in every step: 64 / 16 and 1024 / 256
    few, many = step_us(64, 16, num_steps), step_us(1024, 256, num_steps)
    results["growth_1024_over_64"] = many / few
    print("growth, 1,024 over 64 with four borders each:", end=" ")
    print(f"{many:.1f} / {few:.1f} = {many / few:.2f}")
    results["hash_us_per_block"] = cost = hash_us_per_block()
    print(f"hash: {cost:.3f} us per block of 16 tokens", end="")
    if vllm:
        results["hash_us_per_block_vllm"] = other = vllm.ask("hash")
        print(f"; vLLM {other:.3f}; ratio {other / cost:.1f}", end="")
    print()
    return results


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps; under 20 s without vLLM")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    parser.add_argument("--vllm-python", type=Path, metavar="PATH", help="compare with its vLLM")
    args = parser.parse_args()
    vllm = Vllm(args.vllm_python) if args.vllm_python else None
    try:
        results = measure(200 if args.quick else 2000, vllm)
    finally:
        if vllm:
            vllm.close()
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
