"""Measures `transformers` on the loads of gpu/serve.py: `generate`, and continuous batching.

    python -m gpu.transformers_load --shape 1B --json out.json    (in bench/, as gpu.sh does)

The model has the same shape as there, and random weights. If one of the two ways to generate fails,
its result is the error, and the other one still runs.
"""

import argparse
import random
import time
from collections.abc import Callable

import torch
from harness.case import arguments, main, numbers, write_json
from make_model import SHAPES
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
    """Return the tokens per second of each measurement by its name, or its error."""
    device = torch.device(given.device)
    config = LlamaConfig(**SHAPES[given.shape].config())
    config.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype).eval()
    length = given.output_len
    options = {"max_new_tokens": length, "do_sample": False, "eos_token_id": -1, "pad_token_id": 1}
    results: dict[str, float | str] = {}

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
    for name in given.kinds.split(","):
        for concurrency in given.concurrency:
            key = f"{name}_tok_s_c{concurrency}"
            try:
                with torch.inference_mode():
                    kinds[name](min(concurrency, 2))()  # warms up
                    work = kinds[name](concurrency)
                    results[key] = _tok_s(concurrency * length, work, device)
            except Exception as error:  # noqa: BLE001  the others continue
                results[key] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            print(f"{key:<36} {results[key]}", flush=True)
            if given.json is not None:  # written now, because the next measurement may never end
                write_json(given.json, results)
    return results


if __name__ == "__main__":
    parser = arguments(__doc__, quick="two streams at most")
    add = parser.add_argument
    add("--shape", choices=SHAPES, required=True)
    add("--device", default="cuda")
    add("--concurrency", type=numbers, default="1,256")
    add("--input-len", type=int, default=128)
    add("--output-len", type=int, default=256)
    add("--kinds", default="generate,continuous_batching")
    given = parser.parse_args()
    if given.quick:
        given.concurrency = tuple(each for each in given.concurrency if each <= 2)
    main(given, measure)
