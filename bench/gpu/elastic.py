"""Resizes the pool under load, with live graphs: are the tokens the same, and what does it cost?

    python -m gpu.elastic --shape 1B --json out.json    (in bench/, as gpu.sh does)

The pool is mapped in chunks at fixed addresses. Rows decode by graphs. At every third step, the
pool grows by half or shrinks to the blocks that the rows use. `wrong` counts the tokens that differ
from those of the same rows in a pool of fixed size; `grow_ms` and `shrink_ms` are medians.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from gpu.bare_engine import BareEngine, Driver, Step, capture, make_engine
from gpu.rows import Rows
from harness.case import Results, arguments, main
from make_model import SHAPES

from gpu_worker.memory.elastic import CpuChunks, CudaChunks, ElasticMemory, load_driver

_EVERY = 3


def elastic_memory(device: torch.device, num_blocks: int, block_bytes: int) -> ElasticMemory:
    """Map memory for `num_blocks` blocks, which can grow to twice as many."""
    num_bytes = num_blocks * block_bytes
    if device.type == "cuda":
        torch.empty(1, device=device)  # the driver's calls need a context
        return ElasticMemory(CudaChunks(load_driver(), device, 2 * num_bytes), num_bytes)
    return ElasticMemory(CpuChunks(2 * num_bytes, lambda: 2 * num_bytes), num_bytes)


def tokens_of(
    engine: BareEngine, given: argparse.Namespace, *, resizes: bool
) -> tuple[list[list[int]], dict[str, list[float]]]:
    """Return the tokens of each step, and the milliseconds of each resize."""
    step = Step(given.rows, given.context)
    used = given.rows * -(-(given.context + given.steps + 2) // engine.limits.block_size)
    size = engine.limits.num_blocks
    driver = Driver(engine.graphs, engine.limits, step, given.steps)
    tokens, times = [], {"grow_ms": [], "shrink_ms": []}  # type: ignore[var-annotated]
    for number in range(given.steps):
        if resizes and number % _EVERY == _EVERY - 1:
            name, target = "grow_ms", size + size // 2
            if engine.pool.num_blocks > size:
                name, target = "shrink_ms", max(used, 2)
            started = time.perf_counter()
            engine.graphs.resize_pool(target)
            times[name].append((time.perf_counter() - started) * 1e3)
        tokens += [result.sampled_token_ids.tolist() for result in driver.run(1)]
    if resizes:
        engine.graphs.resize_pool(size)
    engine.reset()
    return tokens, times


def compare(engine: BareEngine, given: argparse.Namespace) -> Mapping[str, Any]:
    expected, _ = tokens_of(engine, given, resizes=False)
    found, times = tokens_of(engine, given, resizes=True)
    wrong = sum(a != b for x, y in zip(found, expected, strict=True) for a, b in zip(x, y))  # noqa: B905
    medians = {name: statistics.median(each) for name, each in times.items() if each}
    return {"wrong": wrong, "of": sum(map(len, expected)), **medians}


def measure(given: argparse.Namespace) -> Results:
    device = torch.device(given.device)
    table = Rows(given.json)
    engine = make_engine(
        SHAPES[given.shape],
        device,
        max_num_seqs=given.rows,
        max_num_batched_tokens=max(256, given.rows),
        kv_gb=given.kv_gb,
        memory=functools.partial(elastic_memory, device),
    )
    table.start(lambda: capture(engine, device, pieces=False))
    table.run("resizes", lambda: compare(engine, given))
    results = {"wrong": table.rows["resizes"].get("wrong", given.rows * given.steps)}
    table.write(**results)
    return results | {"rows": table.rows}


if __name__ == "__main__":
    parser = arguments(__doc__, quick="has no effect")
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="1B")
    add("--device", default="cuda:0")
    add("--rows", type=int, default=16)
    add("--context", type=int, default=64)
    add("--steps", type=int, default=60)
    add("--kv-gb", type=float, default=8.0)
    with torch.inference_mode():
        results = main(parser.parse_args(), measure)
    failed = any("error" in row for row in results["rows"].values())
    sys.exit(1 if results["wrong"] or failed else 0)
