"""Measures a step without LoRA adapters, with one and with four, natively and layer by layer.

    python bench/make_model.py /tmp/llama-125m
    python bench/adapters.py /tmp/llama-125m

Times the worker's part of a step in bfloat16 on a CPU, from the rows to the final hidden states,
without logits and sampling. The steps are decodes of 1, 8 and 32 rows of 160 tokens, and prefills
of 512 tokens, of one or of four prompts. The adapters are random and change all seven modules. All
variants take turns; the numbers are medians in milliseconds.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from harness.case import Results, Table, arguments, main
from harness.turns import turns
from safetensors.torch import save_file

from contract.worker_limits import Limits
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.lora.adapted_maps import AdaptableConfig, adapted_maps
from gpu_worker.lora.adapter import Adapter
from gpu_worker.lora.adapter_files import load_adapter
from gpu_worker.models.attention import Decoder
from gpu_worker.models.registry import open_model
from gpu_worker.step.input_batch import build_input_batch
from gpu_worker.step.rows import Rows, ScheduledRows

_DTYPE, _DEVICE = torch.bfloat16, torch.device("cpu")
_CONTEXT, _PROMPT_LEN, _BLOCK_SIZE, _NUM_ADAPTERS = 160, 512, 16, 4
_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Way:
    """One way to compute a step."""

    name: str
    num_adapters: int
    is_native: bool


WAYS = (
    Way("no adapter", 0, is_native=True),
    Way("one", 1, is_native=True),
    Way("one, layer by layer", 1, is_native=False),
    Way("four", 4, is_native=True),
    Way("four, layer by layer", 4, is_native=False),
)


class Steps:
    """Runs steps of a model with a separate KV pool."""

    def __init__(self, directory: Path, rank: int) -> None:
        source = open_model(directory)
        assert isinstance(source.config, AdaptableConfig), "only these models have adapters"
        self._model: Decoder = source.load(_DTYPE, _DEVICE, lambda _: None)
        self._limits = Limits(
            max_num_seqs=32,
            max_model_len=1024,
            max_num_batched_tokens=2048,
            num_blocks=32 * 64,
            block_size=_BLOCK_SIZE,
            vocab_size=source.config.vocab_size,
        )
        self._pool = KvPool(source.config, self._limits.num_blocks, _BLOCK_SIZE, _DTYPE, _DEVICE)
        self._rows = Rows(self._limits)
        generator = np.random.default_rng(0)
        vocab, tokens = self._limits.vocab_size, self._rows.token_ids
        tokens[:] = generator.integers(vocab, size=tokens.shape)
        blocks = generator.permutation(self._limits.num_blocks)
        self._rows.block_tables[:] = blocks.reshape(self._limits.max_num_seqs, -1)
        self._last_token_ids = torch.zeros(self._limits.max_num_seqs, dtype=torch.int64)
        self._adapters = random_adapters(source.config, rank)
        plain = {n: replace(adapter, native=None) for n, adapter in self._adapters.items()}
        self._adapters_of = {True: self._adapters, False: plain}

    def seconds(self, way: Way, num_rows: int, start: int, num_tokens: int) -> float:
        """Return the seconds of one step: `num_tokens` tokens of each row, after `start` tokens."""
        rows = np.arange(num_rows)
        self._rows.adapter[rows] = 1 + rows % way.num_adapters if way.num_adapters else 0
        is_decode = num_tokens == 1
        scheduled = ScheduledRows(
            rows=rows,
            starts=np.full(num_rows, start),
            lens=np.full(num_rows, num_tokens),
            num_decodes=num_rows if is_decode else 0,
            sampling=rows,
            positions=np.full(num_rows, start + num_tokens),
            incarnations=np.zeros_like(rows),
        )
        began = time.perf_counter()
        batch = build_input_batch(
            self._rows,
            scheduled,
            self._last_token_ids,
            _BLOCK_SIZE,
            is_all_known=True,
            adapters=self._adapters_of[way.is_native],
        )
        self._model.forward(batch.token_ids, batch.positions, self._pool, batch.metadata)
        return time.perf_counter() - began


def random_adapters(config: AdaptableConfig, rank: int) -> Mapping[int, Adapter]:
    """Load random adapters; return them by number."""
    adapters = {}
    for number in range(1, _NUM_ADAPTERS + 1):
        with tempfile.TemporaryDirectory() as name:
            write_adapter(Path(name), config, rank)
            adapters[number] = load_adapter(str(number), Path(name), config, _DTYPE, _DEVICE)
    return adapters


def write_adapter(directory: Path, config: AdaptableConfig, rank: int) -> None:
    """Write a random adapter as PEFT does."""
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": _MODULES}
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    tensors = {}
    for layer in range(config.num_layers):
        for adapted in adapted_maps(config, layer):
            for module in adapted.modules:
                name = f"base_model.model.{module.name}"
                tensors[f"{name}.lora_A.weight"] = 0.02 * torch.randn(rank, adapted.num_in)
                tensors[f"{name}.lora_B.weight"] = 0.02 * torch.randn(module.num_out, rank)
    save_file(tensors, directory / "adapter_model.safetensors")


def median_ms(
    steps: Steps, ways: list[Way], num_rows: int, start: int, num_tokens: int, num_turns: int
) -> dict[str, float]:
    """Time all variants in turn; return each one's median, in milliseconds."""
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    num_steps = 1 if num_tokens > 1 else 4
    with torch.inference_mode():
        for index, way in turns(ways, num_turns, warm_ups=2):
            each = [steps.seconds(way, num_rows, start, num_tokens) for _ in range(num_steps)]
            if index >= 0:
                seconds[way.name].append(statistics.median(each))
    return {name: 1000 * statistics.median(each) for name, each in seconds.items()}


def measure(given: argparse.Namespace) -> Results:
    steps = Steps(given.model, given.rank)
    num_turns = 3 if given.quick else given.turns
    print(f"ms, medians of {num_turns} turns; rank {given.rank}, {torch.get_num_threads()} threads")
    table = Table("step:<24", *(f"{way.name}:.2f" for way in WAYS))
    cases = [(f"decode, {n} rows", n, _CONTEXT, 1) for n in (1, 8, 32)]
    cases += [(f"{n} prompts, {_PROMPT_LEN} tokens", n, 0, _PROMPT_LEN // n) for n in (1, 4)]
    results = {}
    for name, num_rows, start, num_tokens in cases:
        ways = [way for way in WAYS if way.num_adapters <= num_rows]
        medians = median_ms(steps, ways, num_rows, start, num_tokens, num_turns)
        table.row(name, *(medians.get(way.name) for way in WAYS))
        key = name.replace(",", "").replace(" ", "_")
        results |= {
            f"{key}_{way.replace(',', '').replace(' ', '_')}_ms": ms for way, ms in medians.items()
        }
    return results


if __name__ == "__main__":
    parser = arguments(__doc__, quick="three turns of each way")
    parser.add_argument("model", type=Path, help="a directory as make_model.py writes it")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--turns", type=int, default=30, help="turns of each way")
    main(parser.parse_args(), measure)
