"""A worker's executor over random weights, without a service: shows what steps cost.

Sequences start as after a hit in the prefix cache: their KV counts as computed, so that a long
context costs nothing to make. Weights and KV are random, because a GPU is faster with zeros.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from gpu.rows import reason
from make_model import Sizes, write_shape
from prometheus_client import REGISTRY

from contract.arrays import Int32Array
from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan, Result, StepId
from contract.worker_limits import Limits
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.kv.layout import block_bytes, kv_dtypes
from gpu_worker.loading.device import pick_attention
from gpu_worker.memory.elastic import ElasticMemory
from gpu_worker.models.registry import open_model
from gpu_worker.step.executor import Executor, LaunchedStep
from gpu_worker.step.graphs.cuda_graphs import Between, CudaGraphs, GraphBackend
from gpu_worker.step.warm_up import warm_up
from gpu_worker.weights.quantized_linear import Quantization
from kernels.batch_invariant import BatchInvariantAttention

GREEDY: Final = SamplingParams(seed=0, temperature=0.0, ignore_eos=True)
TOP_P: Final = SamplingParams(seed=0, temperature=1.0, top_p=0.9, ignore_eos=True)
_BLOCK_SIZE: Final = 16
_WARM_UP_STEPS: Final = 3
_BUSY: Final = "quire_worker_device_busy_seconds_total"


class ComputedAgain:
    """A `GraphBackend` for smoke tests, whose replays compute the steps again."""

    def capture(self, compute: Callable[[Between], None]) -> Callable[[], object]:
        compute(lambda work: work())
        return lambda: compute(lambda work: work())

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def graph_backend(device: torch.device) -> GraphBackend:
    return CudaGraphs(device) if device.type == "cuda" else ComputedAgain()


@dataclass(frozen=True, slots=True, eq=False)
class BareEngine:
    """Executors over one model and one pool: one replays graphs, the other computes eagerly."""

    graphs: Executor
    eager: Executor
    pool: KvPool
    limits: Limits

    def reset(self) -> None:
        self.graphs.reset()
        self.eager.reset()


def make_engine(
    sizes: Sizes,
    device: torch.device,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    kv_gb: float,
    quantization: Quantization | None = None,
    is_batch_invariant: bool = False,
    memory: Callable[[int, int], ElasticMemory] | None = None,
) -> BareEngine:
    """Build an engine as a worker is built at its start; `capture` makes the graphs.

    `memory` returns elastic memory; it takes the number of blocks and the bytes of a block.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as directory:
        write_shape(Path(directory), sizes)
        source = open_model(
            Path(directory),
            quantization=quantization,
            is_dummy=True,
            is_batch_invariant=is_batch_invariant,
        )
        config = source.config
        model = source.load(dtype, device, lambda _: None)
    attention: Any = pick_attention("triton", device)
    if is_batch_invariant:
        attention = BatchInvariantAttention(max_num_seqs, device)
    dtypes = kv_dtypes("auto", frozenset(), dtype, config.num_layers)
    bytes_per_block = block_bytes(config, _BLOCK_SIZE, dtypes)
    num_blocks = max(2, int(kv_gb * 2**30) // bytes_per_block)
    elastic = None if memory is None else memory(num_blocks, bytes_per_block)
    pool = KvPool(*(config, num_blocks, _BLOCK_SIZE, dtypes, device, elastic), attention=attention)
    pool.blocks_as_bytes[:num_blocks].view(dtype).normal_()
    limits = Limits(
        max_num_seqs=max_num_seqs,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        vocab_size=config.vocab_size,
    )
    graphs, eager = (Executor(model, pool, limits, (), device) for _ in range(2))
    return BareEngine(graphs, eager, pool, limits)


def capture(engine: BareEngine, device: torch.device, *, pieces: bool = True) -> dict[str, Any]:
    """Capture graphs and warm up, as a worker does; return how long both took, or their errors."""
    backend = graph_backend(device)
    results: dict[str, Any] = {}

    def warm_up_both() -> None:
        for executor in (engine.graphs, engine.eager):
            warm_up(executor, engine.limits, has_structured_output=False)

    works = {"capture_decodes": lambda: engine.graphs.capture_decodes(backend, lambda _: None)}
    if pieces:
        works["capture_pieces"] = lambda: engine.graphs.capture_pieces(backend, lambda _: None)
    for name, work in (works | {"warm_up": warm_up_both}).items():
        started = time.perf_counter()
        try:
            work()
        except Exception as error:  # noqa: BLE001  such steps run without graphs, as in a worker
            results["error"] = f"{name}: {reason(error)}"
        results[f"{name}_s"] = time.perf_counter() - started
    return results


@dataclass(frozen=True, slots=True)
class Step:
    """A kind of step: rows that decode, and a prompt beside them."""

    num_decodes: int
    context: int
    """Tokens of each row that decodes, at the first step."""
    num_prompt_tokens: int = 0
    """Tokens of the prompt; 0: there is none."""
    sampling: SamplingParams = GREEDY

    @property
    def name(self) -> str:
        parts = []
        if self.num_decodes:
            parts.append(f"{self.num_decodes} x {self.context}")
        if self.num_prompt_tokens:
            parts.append(f"{self.num_prompt_tokens} prompt tokens")
        return " + ".join(parts) + (" top-p" if self.sampling is TOP_P else "")


class Driver:
    """Runs steps of one kind in an executor, with as many in flight as the executor takes."""

    def __init__(self, executor: Executor, limits: Limits, step: Step, num_steps: int) -> None:
        """Free all rows, and start the rows of `step`; at most `num_steps` steps may follow."""
        self._executor, self._limits, self._step = executor, limits, step
        self._draw = np.random.default_rng(0)
        self._num_steps = 0
        self.launch_s = 0.0
        """Time that the host took to launch steps."""
        executor.reset()
        if step.num_decodes:
            rows = range(step.num_decodes)
            most = step.context + num_steps + 2
            new = [self._new(row, step.context, step.context - 1, most) for row in rows]
            self._collect(self._launch(self._plan(0, new, [1] * len(new))))

    def run(self, num_steps: int) -> list[Result]:
        """Run steps, and wait for their results."""
        results: list[Result] = []
        in_flight: list[LaunchedStep] = []
        for _ in range(num_steps):
            if len(in_flight) == self._executor.max_in_flight:
                results.append(self._collect(in_flight.pop(0)))
            in_flight.append(self._launch(self._next()))
        return results + [self._collect(each) for each in in_flight]

    def _next(self) -> Plan:
        step = self._step
        if not step.num_prompt_tokens:
            return self._plan(step.num_decodes, [], [])
        row, length = step.num_decodes, step.num_prompt_tokens
        plan = self._plan(step.num_decodes, [self._new(row, length, 0, length + 1)], [length])
        if self._executor.rows.num_used > row:
            plan = replace(plan, released_rows=np.array([row], np.int32))
        return plan

    def _plan(self, num_decodes: int, new: list[NewSequence], lens: list[int]) -> Plan:
        self._num_steps += 1
        return Plan(
            StepId(self._num_steps),
            num_decodes,
            new_sequences=tuple(new),
            chunk_rows=np.array([each.row for each in new], np.int32),
            chunk_lens=np.array(lens, np.int32),
        )

    def _new(self, row: int, length: int, num_computed: int, most_tokens: int) -> NewSequence:
        """Make a sequence; if the pool is too small for all, some share blocks."""
        limits = self._limits
        count = -(-most_tokens // limits.block_size)
        tokens: Int32Array = self._draw.integers(2, limits.vocab_size, length, np.int32)
        return NewSequence(
            seq_id=row,
            row=row,
            token_ids=tokens,
            num_prompt_tokens=length,
            num_computed_tokens=num_computed,
            block_ids=(np.arange(count, dtype=np.int32) + row * count) % limits.num_blocks,
            sampling=self._step.sampling,
            max_total_tokens=most_tokens,
        )

    def _launch(self, plan: Plan) -> LaunchedStep:
        started = time.perf_counter()
        launched = self._executor.launch(plan)
        self.launch_s += time.perf_counter() - started
        return launched

    def _collect(self, launched: LaunchedStep) -> Result:
        result = self._executor.collect(launched)
        assert not len(result.failed_rows), "logits are not finite"
        return result


def step_ms(
    executor: Executor, limits: Limits, step: Step, device: torch.device, num_steps: int
) -> dict[str, float]:
    """Return a step's time in all, the host's time to launch it, and the device's time."""
    driver = Driver(executor, limits, step, num_steps + _WARM_UP_STEPS)
    driver.run(_WARM_UP_STEPS)
    synchronize(device)
    driver.launch_s, busy_s = 0.0, _busy_s()
    started = time.perf_counter()
    driver.run(num_steps)
    synchronize(device)
    wall_s = time.perf_counter() - started
    executor.reset()
    per_step = 1e3 / num_steps
    return {
        "ms": wall_s * per_step,
        "launch_ms": driver.launch_s * per_step,
        "device_ms": (_busy_s() - busy_s) * per_step,
        "tok_s": (step.num_decodes + step.num_prompt_tokens) * num_steps / wall_s,
    }


def closed_load(
    executor: Executor, limits: Limits, streams: int, input_len: int, output_len: int
) -> dict[str, float]:
    """Prefill `streams` prompts, then decode them to their end; return output tokens per second.

    A service with as many clients would reach this rate if it cost nothing.
    """
    executor.reset()
    draw = np.random.default_rng(0)
    count = -(-(input_len + output_len) // limits.block_size)
    per_step = max(1, (limits.max_num_batched_tokens - streams) // input_len)
    started = time.perf_counter()
    first_s = 0.0
    in_flight: list[LaunchedStep] = []
    num_begun = num_tokens = number = 0
    while num_tokens < streams * output_len:
        rows = range(num_begun, min(streams, num_begun + per_step))
        new = tuple(
            NewSequence(
                seq_id=row,
                row=row,
                token_ids=draw.integers(2, limits.vocab_size, input_len, np.int32),
                num_prompt_tokens=input_len,
                num_computed_tokens=0,
                block_ids=(np.arange(count, dtype=np.int32) + row * count) % limits.num_blocks,
                sampling=GREEDY,
                max_total_tokens=input_len + output_len,
            )
            for row in rows
        )
        num_decodes = int(executor.rows.is_decoding.sum())
        if new or num_decodes:
            number += 1
            chunks = np.full(len(new), input_len, np.int32)
            numbers = np.array(rows, np.int32)
            plan = Plan(
                *(StepId(number), num_decodes),
                new_sequences=new,
                chunk_rows=numbers,
                chunk_lens=chunks,
            )
            in_flight.append(executor.launch(plan))
            num_begun += len(new)
        if len(in_flight) == executor.max_in_flight or not (new or num_decodes):
            num_tokens += len(executor.collect(in_flight.pop(0)).sampled_rows)
            first_s = first_s or time.perf_counter() - started
    seconds = time.perf_counter() - started
    executor.reset()
    return {"output_tok_s": num_tokens / seconds, "first_ms": first_s * 1e3, "steps": number}


@contextlib.contextmanager
def traced(file: Path, device: torch.device) -> Iterator[None]:
    """Write a profiler's trace of the block, for chrome://tracing or Perfetto."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profiler:
        yield
        synchronize(device)
    profiler.export_chrome_trace(str(file))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _busy_s() -> float:
    return REGISTRY.get_sample_value(_BUSY) or 0.0
