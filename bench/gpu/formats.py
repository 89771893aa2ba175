"""Measures a step with each format of weights, and what the format costs in quality.

    python -m gpu.formats --shape 8B --json out.json    (in bench/, as gpu.sh does)

First come milliseconds per decode step for some numbers of rows, with graphs: in 16 bits, fp8, int8
and int4, and in 16 bits with `--batch-invariant`. The weights are random and have the given shape.
In fp8 they are rounded as in checkpoints, with a scale for each output. Then comes the shipped
model's perplexity in the same formats, on the same device (`quality.py`).
"""

import argparse
import asyncio
import functools
import gc
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu.bare_engine import BareEngine, Step, capture, make_engine, step_ms
from gpu.rows import Rows
from harness.case import SHIPPED_MODEL, Results, arguments, main, numbers
from make_model import SHAPES
from quality import perplexity
from quantize import FORMS, write

from gpu_worker.weights import gpu_linear
from gpu_worker.weights.linear import Linear, make_linear
from gpu_worker.weights.quantized_linear import Quantization
from gpu_worker.weights.reader import Weights

FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {},
    "int8": {"quantization": Quantization.INT8},
    "int4": {"quantization": Quantization.INT4},
    "batch-invariant": {"is_batch_invariant": True},
}
_CHECKPOINTS = {"fp8": "fp8_channel"}
_FP8_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_NUM_TOKENS = 6_000


def fp8_map(
    weights: Weights, weight: torch.Tensor, bias: torch.Tensor | None, _: Quantization | None
) -> Linear:
    """Stand in for `Weights._map`: make the map that an fp8 checkpoint would have."""
    scales = (weight.abs().amax(1, keepdim=True).float() / _FP8_LARGEST).clamp_(min=1e-12)
    values = (weight / scales).to(torch.float8_e4m3fn)
    if gpu_linear.is_here(weight.device):
        return gpu_linear.pack_fp8(values, scales, bias, weights.dtype)
    return make_linear((values.float() * scales).to(weights.dtype), bias)


def engine_of(name: str, given: argparse.Namespace, device: torch.device) -> BareEngine:
    with ExitStack() as stack:
        if name == "fp8":
            stack.enter_context(patch.object(Weights, "_map", fp8_map))
        most = max(given.rows)
        return make_engine(
            SHAPES[given.shape],
            device,
            max_num_seqs=most,
            max_num_batched_tokens=max(256, most),
            kv_gb=given.kv_gb,
            **FORMATS[name],
        )


def measure_steps(name: str, given: argparse.Namespace) -> Mapping[str, Any]:
    device = torch.device(given.device)
    engine = engine_of(name, given, device)
    row = capture(engine, device, pieces=False)
    for num in given.rows:
        step = Step(num, given.context)
        times = step_ms(engine.graphs, engine.limits, step, device, given.steps)
        row[f"ms_{num}"] = times["ms"]
    return row


def measure_quality(name: str, given: argparse.Namespace) -> Mapping[str, Any]:
    """Let a worker with the format score held-out text."""
    # Only prompts are computed, so graphs would be captured in vain.
    device = given.device.partition(":")[0]
    flags = {"dtype": "bfloat16", "device": device, "enforce_eager": "true"}
    options = FORMATS[name]
    if "quantization" in options:
        flags["quantization"] = options["quantization"].value
    with tempfile.TemporaryDirectory() as directory:
        model = SHIPPED_MODEL
        if name in _CHECKPOINTS:
            form = _CHECKPOINTS[name]
            model = write(SHIPPED_MODEL, Path(directory) / form, FORMS[form])
        budget = given.quality_tokens
        value, num_tokens = asyncio.run(perplexity(flags, budget, model))
    return {"perplexity": value, "num_tokens": num_tokens}


def measure(given: argparse.Namespace) -> Results:
    table = Rows(given.json)
    for name in FORMATS:
        table.run(f"steps, {name}", functools.partial(measure_steps, name, given))
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    for name in FORMATS:
        if name == "batch-invariant":
            continue
        table.run(f"quality, {name}", functools.partial(measure_quality, name, given))
    results = {}
    baseline = table.rows["quality, bf16"].get("perplexity")
    for name, value in table.numbers("perplexity").items():
        if baseline:
            results[f"perplexity_{name.partition(', ')[2]}_over_bf16"] = value / baseline
    table.write(**results)
    return results | {"rows": table.rows}


if __name__ == "__main__":
    parser = arguments(__doc__, quick="a small part of the text")
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="8B")
    add("--device", default="cuda:0")
    add("--rows", type=numbers, default=(1, 16, 64), help="sequences that decode")
    add("--context", type=int, default=32)
    add("--steps", type=int, default=20)
    add("--kv-gb", type=float, default=4.0)
    add("--quality-tokens", type=int, default=_NUM_TOKENS)
    given = parser.parse_args()
    if given.quick:
        given.quality_tokens = 50
    with torch.inference_mode():
        results = main(given, measure)
    sys.exit(1 if any("error" in row for row in results["rows"].values()) else 0)
