"""Measures how number formats change a model's perplexity on a text.

    python bench/quality.py
    python bench/quality.py --checkpoints  # also the model as AWQ, GPTQ and fp8 checkpoints
    python bench/quality.py --model DIR --text FILE --variants bf16,weights_int8,weights_int4

By default, the model is the shipped one, and the text is what `models/train.py` held out: one file
in sixty of the Python standard library. This text depends on the Python version, so only numbers
from the same version can be compared. A text is scored in windows of at most 2,047 tokens. Each
window begins with the token with which the model's texts begin, if there is one. Perplexities of
models with different tokenizers cannot be compared.

Each variant is a worker, loaded as its flags say, which scores the text as it scores any prompt:
chunk by chunk, through its paged KV. If the checkpoint is quantized, one more variant, as_is, has
no flags. A variant that a worker refuses is left out, and the worker's reason is printed.
"""

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from harness.case import ROOT, SHIPPED_MODEL, BenchError, Results, Table, arguments, main
from quantize import FORMS, write
from tokenizers import Tokenizer

from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan
from contract.worker_limits import Limits
from gpu_worker.kv.layer_groups import MAX_GROUPS
from gpu_worker.loading.worker_model import load
from gpu_worker.settings import WorkerSettings
from gpu_worker.step_loop import StepLoop
from model_files.errors import ModelError
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
"""Maps the suffix of a result's name to the dtype. In float32 a checkpoint's values are exact."""
_AS_IS = "as_is"
_BASELINE = "bf16"
_MAX_WINDOW = 2047
"""The most tokens that are scored together; the KV has room for as many."""
_BLOCK_SIZE = 16
_QUICK_TOKENS = 6_000
_ATTACHMENT = 0


def held_out_texts() -> Iterator[str]:
    """Yield the files that the training of the shipped model held out."""
    sys.path.insert(0, str(ROOT / "models"))  # the training code knows which files were held out
    from corpus import read_sources  # noqa: PLC0415

    for source in read_sources():
        if source.is_held_out and not source.is_test:
            yield source.text


def windows(
    tokenizer: Tokenizer, texts: Iterable[str], max_tokens: int, budget: float
) -> Iterator[list[int]]:
    """Yield token ids to score: texts, cut after `max_tokens`, about `budget` tokens in all."""
    begin = tokenizer.encode("").ids[:1]
    if tokenizer.encode("a").ids[:1] != begin:
        begin = []  # an empty text has no token, or one that the tokenizer adds at the end
    length = max_tokens - len(begin)
    num_tokens = 0
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        for start in range(0, len(ids), length):
            if num_tokens >= budget:
                return
            window = [*begin, *ids[start : start + length]]
            num_tokens += len(window) - 1
            yield window


async def perplexity(
    flags: Mapping[str, str],
    budget: float,
    model: Path = SHIPPED_MODEL,
    text: str | None = None,
) -> tuple[float, int]:
    """Return the text's perplexity at a worker with these flags, and how many tokens it scored.

    If `text` is None, the text is all files that the training of the shipped model held out.

    Raises:
        ModelError: The worker refuses the flags.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    defaults = {
        "device": "cpu",
        "block_size": _BLOCK_SIZE,
        # a block for each KV group; memory that is not written takes no room
        "num_blocks": -(-(_MAX_WINDOW + 1) // _BLOCK_SIZE) * MAX_GROUPS,
    }
    settings = WorkerSettings(model=model, **(defaults | flags))
    loop = asyncio.get_running_loop()
    loaded = await asyncio.to_thread(load, settings, lambda *_: None, loop)
    info, steps = loaded.info, loaded.steps
    try:
        await steps.attach(_ATTACHMENT)
        scores: list[float] = []
        step_id = 1
        # the context must have room for one more token
        max_tokens = min(info.limits.max_model_len - 1, _MAX_WINDOW)
        texts = held_out_texts() if text is None else (text,)
        for window in windows(tokenizer, texts, max_tokens, budget):
            scored, step_id = await _score(steps, info.limits, window, step_id)
            scores += scored
    finally:
        await steps.stop()
    if not scores:
        raise BenchError("the text has no token to score")
    return math.exp(-math.fsum(scores) / len(scores)), len(scores)


async def _score(
    steps: StepLoop, limits: Limits, prompt: list[int], step_id: int
) -> tuple[list[float], int]:
    """Return the log-probabilities of all tokens but the first, and the next step's number."""
    num_blocks = -(-len(prompt) // limits.block_size) * len(limits.kv_windows)
    row = NewSequence(
        seq_id=step_id,
        row=0,
        token_ids=np.array(prompt, np.int32),
        num_prompt_tokens=len(prompt),
        num_computed_tokens=0,
        block_ids=np.arange(num_blocks, dtype=np.int32),
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
    budget = _QUICK_TOKENS if given.quick else math.inf
    text = None if given.text is None else given.text.read_text(encoding="utf-8")
    found: dict[str, float] = {}
    num_tokens = 0

    async def add(name: str, flags: Mapping[str, str], model: Path) -> None:
        nonlocal num_tokens
        try:
            found[name], num_tokens = await perplexity(flags, budget, model, text)
        except ModelError as error:
            print(f"{name} is left out: {error}")

    for name in given.variants:
        await add(name, _VARIANTS.get(name, {}), given.model)
    with TemporaryDirectory() as directory:
        for name, form in FORMS.items() if given.checkpoints else ():
            model = write(given.model, Path(directory) / name, form)
            for suffix, dtype in _CHECKPOINT_DTYPES.items():
                await add(name + suffix, {"dtype": dtype}, model)
    if not found:
        raise BenchError("the worker refuses every variant")
    baseline = next(name for name in (_BASELINE, _AS_IS, *found) if name in found)
    print(
        f"{given.model.name}: perplexity of {num_tokens} tokens of {given.text or 'held-out text'};"
        f" Python {sys.version.split()[0]}, torch {torch.__version__}"
    )
    table = Table("format:<16", "perplexity:.4f", f"÷ {baseline}:.4f")
    for name, value in found.items():
        table.row(name, value, value / found[baseline])
    return {f"ppl_{name}": value for name, value in found.items()} | {"num_tokens": num_tokens}


def _parse() -> argparse.Namespace:
    parser = arguments(__doc__, quick="a small part of the text")
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", default=SHIPPED_MODEL, help="with a tokenizer.json")
    add("--text", type=Path, metavar="FILE", help="in UTF-8; default: the held-out text")
    add("--variants", metavar="NAMES", help=f"some of {','.join((_AS_IS, *_VARIANTS))}")
    add("--checkpoints", action="store_true", help="also as checkpoints of other programs")
    given = parser.parse_args()
    for name in "config.json", "tokenizer.json":
        if not (given.model / name).is_file():
            parser.error(f"--model: {given.model} has no {name}")
    if given.text is not None and not given.text.is_file():
        parser.error(f"--text: {given.text} is not a file")
    if given.checkpoints and not (given.model / "model.safetensors").is_file():
        parser.error(f"--checkpoints: {given.model} has no model.safetensors")
    config = json.loads((given.model / "config.json").read_text())
    is_quantized = config.get("quantization_config") is not None
    if given.variants is None:
        given.variants = (*((_AS_IS,) if is_quantized else ()), *_VARIANTS)
    else:
        given.variants = tuple(given.variants.split(","))
    if unknown := set(given.variants) - {_AS_IS, *_VARIANTS}:
        known = ", ".join((_AS_IS, *_VARIANTS))
        parser.error(f"--variants: {min(unknown)}: must be one of {known}")
    if is_quantized and given.checkpoints:
        parser.error(f"--checkpoints: {given.model} is quantized already")
    return given


if __name__ == "__main__":
    logs.configure("warning", "console", "quality")
    main(_parse(), measure)
