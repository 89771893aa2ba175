"""Measures `transformers` on the workload of `gpu_serve.py`: `generate`, and continuous batching.

    python bench/gpu_transformers.py --shape 1B --json out.json

The model is of the same shape, with random weights. Each part fails alone, and says why.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_shapes import SHAPES
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig


def _prompts(count: int, length: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(2, 1000) for _ in range(length)] for _ in range(count)]


def _tok_s(num_tokens: int, work: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return num_tokens / (time.perf_counter() - started)


def measure(given: argparse.Namespace) -> dict[str, float | str]:
    """Names to numbers, or to why there is none."""
    device = torch.device(given.device)
    config = LlamaConfig(**SHAPES[given.shape].config("bfloat16"))
    config.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype).eval()
    length = given.output_len
    options = {"max_new_tokens": length, "do_sample": False, "eos_token_id": -1, "pad_token_id": 1}
    numbers: dict[str, float | str] = {}

    def generate(count: int) -> Callable[[], object]:
        inputs = torch.tensor(_prompts(count, given.input_len), device=device)
        mask = torch.ones_like(inputs)
        with_length = GenerationConfig(**options, min_new_tokens=length)
        return lambda: model.generate(inputs, attention_mask=mask, generation_config=with_length)

    def batched(count: int) -> Callable[[], object]:
        prompts = _prompts(count, given.input_len)
        return lambda: model.generate_batch(
            inputs=prompts, generation_config=GenerationConfig(**options)
        )

    kinds = {"generate": generate, "continuous_batching": batched}
    for name in given.kinds:
        for concurrency in given.concurrency:
            key = f"{name}_tok_s_c{concurrency}"
            try:
                with torch.inference_mode():
                    kinds[name](min(concurrency, 2))()  # warms up
                    work = kinds[name](concurrency)
                    numbers[key] = _tok_s(concurrency * length, work, device)
            except Exception as error:  # noqa: BLE001  whatever it is, the others go on
                numbers[key] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            print(f"{key:<36} {numbers[key]}", flush=True)
            # Now, since the next one may never end.
            given.json.write_text(json.dumps(numbers, indent=1) + "\n")
    return numbers


def _main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--shape", choices=SHAPES, required=True)
    add("--device", default="cuda")
    add("--concurrency", default="1,256")
    add("--input-len", type=int, default=128)
    add("--output-len", type=int, default=256)
    add("--kinds", default="generate,continuous_batching")
    add("--json", type=Path, required=True)
    given = parser.parse_args()
    given.concurrency = tuple(map(int, given.concurrency.split(",")))
    given.kinds = given.kinds.split(",")
    measure(given)


if __name__ == "__main__":
    _main()
