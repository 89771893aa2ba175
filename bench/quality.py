"""Measures how number formats change the shipped model's perplexity on held-out text.

    python bench/quality.py
    python bench/quality.py --checkpoints  # also the model as AWQ, GPTQ and fp8 checkpoints

`models/train.py` held this text out: modules of the Python standard library, one file in sixty.
Each variant is a worker, loaded as its flags say, which scores the text as it scores any prompt:
chunk by chunk, through its paged KV. The numbers depend only on the text, so compare numbers from
one Python version.
"""

import argparse
import asyncio
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from harness.case import ROOT, SHIPPED_MODEL, Results, Table, arguments, main
from quantize import FORMS, write
from tokenizers import Tokenizer

from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan
from contract.worker_limits import Limits
from gpu_worker.loading.worker_model import load
from gpu_worker.loop import StepLoop
from gpu_worker.settings import WorkerSettings
from rpc.observe import logs

_VARIANTS: dict[str, dict[str, str]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "fp8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "weights_int8": {"dtype": "bfloat16", "quantization": "int8"},
    "weights_int4": {"dtype": "bfloat16", "quantization": "int4"},
}
"""Maps each variant to the worker's flags; its result is `ppl_` and the variant's name."""
_CHECKPOINT_DTYPES = {"": "bfloat16", "_fp32": "float32"}
"""By the suffix of the result. In float32 a checkpoint's values are exact."""
_BASELINE = "bf16"
_QUICK_TOKENS = 6_000
_ATTACHMENT = 0


def held_out_prompts(max_tokens: int, budget: float) -> Iterator[list[int]]:
    """Yield the text's token ids: whole files, cut at the context's end, about `budget` in all."""
    sys.path.insert(0, str(ROOT / "models"))  # the training code knows which files were held out
    from corpus import BOS, read_sources  # noqa: PLC0415

    tokenizer = Tokenizer.from_file(str(SHIPPED_MODEL / "tokenizer.json"))
    begin = tokenizer.token_to_id(BOS)
    num_tokens = 0
    for source in read_sources():
        if not source.is_held_out or source.is_test:
            continue
        ids = tokenizer.encode(source.text, add_special_tokens=False).ids
        for start in range(0, len(ids), max_tokens - 1):
            if num_tokens >= budget:
                return
            prompt = [begin, *ids[start : start + max_tokens - 1]]
            num_tokens += len(prompt) - 1
            yield prompt


async def perplexity(
    flags: dict[str, str], budget: float, model: Path = SHIPPED_MODEL
) -> tuple[float, int]:
    """Return the text's perplexity at a worker with these flags, and how many tokens it scored."""
    settings = WorkerSettings(model=model, **({"device": "cpu", "kv_cache_memory_gb": 0.1} | flags))
    loop = asyncio.get_running_loop()
    loaded = await asyncio.to_thread(load, settings, lambda *_: None, loop)
    info, steps = loaded.info, loaded.steps
    try:
        await steps.attach(_ATTACHMENT)
        scores: list[float] = []
        step_id = 1
        # the context must have room for one more token
        for prompt in held_out_prompts(info.limits.max_model_len - 1, budget):
            scored, step_id = await _score(steps, info.limits, prompt, step_id)
            scores += scored
    finally:
        await steps.stop()
    return math.exp(-math.fsum(scores) / len(scores)), len(scores)


async def _score(
    steps: StepLoop, limits: Limits, prompt: list[int], step_id: int
) -> tuple[list[float], int]:
    """Return the log-probabilities of all tokens but the first, and the next step's number."""
    row = NewSequence(
        seq_id=step_id,
        row=0,
        token_ids=np.array(prompt, np.int32),
        num_prompt_tokens=len(prompt),
        num_computed_tokens=0,
        block_ids=np.arange(-(-len(prompt) // limits.block_size), dtype=np.int32),
        sampling=SamplingParams(seed=0, temperature=0, ignore_eos=True, prompt_logprobs=0),
        max_total_tokens=len(prompt) + 1,
    )
    scores: list[float] = []
    for start in range(0, len(prompt), limits.max_num_batched_tokens):
        step = Plan(
            step_id=step_id,
            num_decodes=0,
            new_sequences=() if start else (row,),
            chunk_rows=np.zeros(1, np.int32),
            chunk_lens=np.array(
                [min(limits.max_num_batched_tokens, len(prompt) - start)], np.int32
            ),
        )
        output = await steps.submit(_ATTACHMENT, step)
        step_id += 1
        scores += [each.logprob for part in output.prompt_logprobs for each in part.logprobs]
    release = Plan(step_id=step_id, num_decodes=0, released_rows=np.zeros(1, np.int32))
    await steps.submit(_ATTACHMENT, release)
    assert len(scores) == len(prompt) - 1, "every token but the first is scored"
    return scores, step_id + 1


async def measure(given: argparse.Namespace) -> Results:
    logs.configure("warning", "console", "quality")
    budget = _QUICK_TOKENS if given.quick else math.inf
    found: dict[str, float] = {}
    num_tokens = 0
    for name, flags in _VARIANTS.items():
        found[name], num_tokens = await perplexity(flags, budget)
    with TemporaryDirectory() as directory:
        for name, form in FORMS.items() if given.checkpoints else ():
            model = write(SHIPPED_MODEL, Path(directory) / name, form)
            for suffix, dtype in _CHECKPOINT_DTYPES.items():
                found[name + suffix], _ = await perplexity({"dtype": dtype}, budget, model)
    python = sys.version.split()[0]
    print(f"perplexity of {num_tokens} held-out tokens; Python {python}, torch {torch.__version__}")
    table = Table("format:<16", "perplexity:.4f", f"÷ {_BASELINE}:.4f")
    for name, value in found.items():
        table.row(name, value, value / found[_BASELINE])
    return {f"ppl_{name}": value for name, value in found.items()} | {"num_tokens": num_tokens}


if __name__ == "__main__":
    parser = arguments(__doc__, quick="a small part of the text")
    parser.add_argument(
        "--checkpoints", action="store_true", help="also as checkpoints of other programs"
    )
    main(parser.parse_args(), measure)
