"""Compares a GPU's tokens with the plain code's, for each way to compute a step.

    python -m gpu.exact --json out.json    (in bench/, as gpu.sh does)

Each row of the table is a kind of worker: plain, with LoRA adapters, with experts, with a draft
model, with quantized KV, and with a pool so small that a scheduler swaps sequences, some of them
forked. The worker computes its tokens eagerly (`eager`), and by CUDA graphs of decodes and of
pieces (`graphs`). The tokens are compared with those of the same kind of worker on the CPU, without
a draft model and without graphs. Prompts of different lengths start one after another, so steps
have prompts, decodes, or both. Half of the rows are greedy, half draw their tokens. The plain
worker's greedy rows are also compared with `transformers` on the same device.

In float32 all tokens must be equal: `wrong` counts those that differ, and if there are any, the
exit status is 1. Quantized KV does not count, because the last bit of a number may decide its
rounding. In bfloat16, products of different numbers of rows may differ in the last bits. There,
`agreeing` is the share of tokens before a row's first difference: eager steps are compared with the
CPU's steps, and graphs with eager steps.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu.bare_engine import graph_backend
from gpu.rows import Rows, reason
from gpu.served import serve
from harness.case import SHIPPED_MODEL, Results, arguments, main
from safetensors.torch import load_file, save_file

from contract.arrays import Int32Array
from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan, StepId
from contract.worker_limits import Limits
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.kv.host_pool import HostPool
from gpu_worker.kv.layout import kv_dtypes
from gpu_worker.lora.adapted_maps import AdaptableConfig
from gpu_worker.lora.adapter_files import load_adapter
from gpu_worker.lora.slots import AdapterSlots
from gpu_worker.models.registry import open_model
from gpu_worker.speculative.draft_model import ModelDrafter
from gpu_worker.step.executor import Executor
from gpu_worker.step.graphs.cuda_graphs import GraphBackend
from tests.lora_fixture import make_adapter

_POLL_S = 0.5
_ENDED = (0, 1)
"""The exit statuses of a process that has all its rows; 1: one of the rows is wrong."""
CPU = torch.device("cpu")
_LEAST_SERVED, _LEAST_SERVED_TOKENS = 4, 20
"""The fewest requests, and tokens of each, that fill the pool."""
_BLOCK_SIZE, _CHUNK, _NUM_EXPERTS = 16, 24, 4
_LIMITS = Limits(
    max_num_seqs=16,
    max_model_len=256,
    max_num_batched_tokens=256,
    num_blocks=16 * 256 // _BLOCK_SIZE,
    block_size=_BLOCK_SIZE,
    vocab_size=0,
)
_SMALL_LIMITS = replace(_LIMITS, max_model_len=176, num_blocks=12, num_host_blocks=256)


@dataclass(frozen=True)
class Kind:
    """A kind of worker."""

    name: str
    model: Path
    adapters: tuple[Path, ...] = ()
    has_drafts: bool = False
    kv_dtype: str = "auto"
    is_served: bool = False
    """Whether a scheduler plans the steps, with less memory than the sequences need."""


def with_experts(model: Path, directory: Path) -> Path:
    """Replace each MLP of the model by experts, and write it: the MLP, and slight changes of it."""
    tensors = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    changed: dict[str, torch.Tensor] = {}
    for name, weight in tensors.items():
        layer, _, part = name.partition(".mlp.")
        if not part:
            changed[name] = weight
            continue
        of_expert = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[part.split(".")[0]]
        for expert in range(_NUM_EXPERTS):
            noise = torch.randn(weight.shape, generator=generator) * weight.float().std() / 4
            to = f"{layer}.block_sparse_moe.experts.{expert}.{of_expert}.weight"
            changed[to] = (weight.float() + noise).to(weight.dtype)
        router = torch.randn(_NUM_EXPERTS, len(tensors["model.norm.weight"]), generator=generator)
        changed[f"{layer}.block_sparse_moe.gate.weight"] = router.to(weight.dtype)
    directory.mkdir()
    save_file(changed, directory / "model.safetensors")
    config = (model / "config.json").read_text()
    for old, new in (("LlamaForCausalLM", "MixtralForCausalLM"), ('"llama"', '"mixtral"')):
        config = config.replace(old, new)
    sizes = f'{{"num_local_experts": {_NUM_EXPERTS}, "num_experts_per_tok": 2,'
    (directory / "config.json").write_text(config.replace("{", sizes, 1))
    return directory


def make_executor(
    kind: Kind, dtype: torch.dtype, device: torch.device, backend: GraphBackend | None
) -> tuple[Executor, Limits]:
    """Build a worker's executor, with graphs if there is a backend; return its limits, too."""
    source = open_model(kind.model)
    config, model = source.config, source.load(dtype, device, lambda _: None)
    loaded = [load_adapter(each.name, each, config, dtype, device) for each in kind.adapters]
    adapters = dict(enumerate(loaded, start=1))
    limits = replace(
        _SMALL_LIMITS if kind.is_served else _LIMITS,
        vocab_size=config.vocab_size,
        adapters={adapter.id: number for number, adapter in adapters.items()},
    )

    def pool(kv_dtype: str) -> KvPool:
        dtypes = kv_dtypes(kv_dtype, frozenset(), dtype, config.num_layers)
        return KvPool(config, limits.num_blocks, _BLOCK_SIZE, dtypes, device)

    drafter = slots = None
    if kind.has_drafts:
        drafter = ModelDrafter(model, pool("auto"), 2, limits, device)
    if adapters and backend is not None:
        assert isinstance(config, AdaptableConfig)
        slots = AdapterSlots(config, device)
    memory = pool(kind.kv_dtype)
    host_pool = None
    if limits.num_host_blocks:
        host_pool = HostPool(memory.blocks_as_bytes, limits.num_host_blocks)
    executor = Executor(
        model,
        memory,
        limits,
        (),
        device,
        host_pool=host_pool,
        drafter=drafter,
        adapters=adapters,
        slots=slots,
    )
    if backend is not None:
        for has_adapters in (False, True) if slots is not None else (False,):
            if drafter is None:  # with a drafter, tokens come from the host
                executor.capture_decodes(backend, lambda _: None, has_adapters=has_adapters)
            executor.capture_pieces(backend, lambda _: None, has_adapters=has_adapters)
        if drafter is not None:
            drafter.capture_decodes(backend, lambda _: None)
            drafter.capture_pieces(backend, lambda _: None)
    return executor, limits


def _prompt(row: int) -> Int32Array:
    return np.arange(1 + row * 29 % 90, dtype=np.int32) * 7 % 900 + row + 2


def generate(executor: Executor, kind: Kind, num_rows: int, num_tokens: int) -> list[list[int]]:
    """Return the tokens of each row. At every second step a row starts, with a chunked prompt."""
    lens = [len(_prompt(row)) for row in range(num_rows)]
    left = lens.copy()
    outputs: list[list[int]] = [[] for _ in lens]
    per_row = _LIMITS.num_blocks // _LIMITS.max_num_seqs
    for step in range(1, 100 * num_tokens):
        started = range(min(num_rows, (step + 1) // 2))
        new = [row for row in started if step == 2 * row + 1]
        chunks = [row for row in started if left[row]]
        counts = [min(left[row], _CHUNK) for row in chunks]
        result = executor.step(
            Plan(
                StepId(step),
                int(executor.rows.is_decoding.sum()),
                new_sequences=tuple(
                    NewSequence(
                        seq_id=row,
                        row=row,
                        token_ids=_prompt(row),
                        num_prompt_tokens=lens[row],
                        num_computed_tokens=0,
                        block_ids=np.arange(per_row, dtype=np.int32) + row * per_row,
                        sampling=SamplingParams(
                            seed=row,
                            temperature=float(row % 2),
                            top_p=0.9 if row % 4 == 1 else 1.0,
                            ignore_eos=True,
                        ),
                        max_total_tokens=lens[row] + num_tokens,
                        adapter=row % (len(kind.adapters) + 1),
                    )
                    for row in new
                ),
                chunk_rows=np.array(chunks, np.int32),
                chunk_lens=np.array(counts, np.int32),
            )
        )
        for row, count in zip(chunks, counts, strict=True):
            left[row] -= count
        for row, token in zip(result.sampled_rows, result.sampled_token_ids, strict=True):
            outputs[row].append(int(token))
        if len(started) == num_rows and all(len(each) >= num_tokens for each in outputs):
            break
    return [each[:num_tokens] for each in outputs]


def num_wrong(outputs: list[list[int]], expected: list[list[int]]) -> int:
    """Return how many tokens are missing or differ."""
    pairs = zip_longest(outputs, expected, fillvalue=())
    return sum(a != b for each, other in pairs for a, b in zip_longest(each, other))


def agreeing(outputs: list[list[int]], expected: list[list[int]]) -> float:
    """Return the share of tokens that come before a row's first difference."""
    same = 0
    for each, other in zip(outputs, expected, strict=True):
        for a, b in zip(each, other, strict=True):
            if a != b:
                break
            same += 1
    return same / sum(map(len, expected))


def greedy_by_transformers(
    model: Path, device: torch.device, num_rows: int, num_tokens: int
) -> list[list[int]]:
    """Return the tokens of the greedy rows of `generate`, in float32."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  slow

    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
    outputs = []
    for row in range(0, num_rows, 2):
        ids = _prompt(row).tolist()
        start = len(ids)
        for _ in range(num_tokens):
            logits = theirs(torch.tensor([ids], device=device)).logits
            ids.append(int(logits[0, -1].argmax()))
        outputs.append(ids[start:])
    return outputs


class Comparison:
    """Generates tokens once for each way to compute them, and compares the ways in rows."""

    def __init__(self, given: argparse.Namespace, table: Rows) -> None:
        self._device = torch.device(given.device)
        self._backend = graph_backend(self._device)
        self._size = given.rows, given.tokens
        self._table = table
        self._made: dict[tuple[str, torch.dtype, str], list[list[int]]] = {}

    def tokens(self, kind: Kind, dtype: torch.dtype, way: str) -> list[list[int]]:
        """Return a worker's tokens, computed on the CPU, eagerly, or by graphs."""
        key = kind.name, dtype, way
        if key not in self._made:
            self._made[key] = self._generate(kind, dtype, way)
        return self._made[key]

    def _generate(self, kind: Kind, dtype: torch.dtype, way: str) -> list[list[int]]:
        if way == "CPU":
            plain = replace(kind, has_drafts=False)
            executor, limits = make_executor(plain, dtype, CPU, None)
        else:
            backend = self._backend if way == "graphs" else None
            executor, limits = make_executor(kind, dtype, self._device, backend)
        if not kind.is_served:
            return generate(executor, kind, *self._size)
        num_rows, num_tokens = self._size
        served = max(num_rows, _LEAST_SERVED), max(num_tokens, _LEAST_SERVED_TOKENS)
        outputs, seen = serve(executor, limits, *served)
        missing = [name for name, count in seen.items() if not count]
        assert not missing, f"no block was {missing}"
        return outputs

    def compare(self, kind: Kind) -> None:
        """Add the rows of a kind. On a CPU, bfloat16 is left out: there is nothing to compare."""
        exact, rounded = torch.float32, torch.bfloat16
        self._row(kind, exact, "eager", "CPU")
        self._row(kind, exact, "graphs", "CPU")
        if self._device.type != "cuda":
            return
        self._row(kind, rounded, "eager", "CPU")
        self._row(kind, rounded, "graphs", "eager")

    def compare_with_transformers(self, kind: Kind) -> None:
        def measure() -> Mapping[str, Any]:
            theirs = greedy_by_transformers(kind.model, self._device, *self._size)
            ours = self.tokens(kind, torch.float32, "eager")[::2]
            return _compared(ours, theirs)

        self._table.run(f"{kind.name}, float32: eager, transformers", measure)

    def _row(self, kind: Kind, dtype: torch.dtype, way: str, than: str) -> None:
        def measure() -> Mapping[str, Any]:
            expected = self.tokens(kind, dtype, than)
            return _compared(self.tokens(kind, dtype, way), expected)

        name = str(dtype).removeprefix("torch.")
        self._table.run(f"{kind.name}, {name}: {way}, {than}", measure)
        self._table.write(wrong_float32=wrong_float32(self._table))


def _compared(outputs: list[list[int]], expected: list[list[int]]) -> Mapping[str, Any]:
    return {
        "wrong": num_wrong(outputs, expected),
        "of": sum(map(len, expected)),
        "agreeing": agreeing(outputs, expected),
    }


def wrong_float32(table: Rows) -> int:
    """Return how many tokens are wrong where all must be equal; a failed row counts as one."""
    return sum(
        row.get("wrong", 1)
        for name, row in table.rows.items()
        if "float32" in name and "KV" not in name
    )


KINDS = ("plain", "swaps and forks", "adapters", "experts", "drafts", "int8 KV", "fp8 KV")


def make_kind(name: str, directory: Path) -> Kind:
    """Return a kind by its name; write the files that the kind needs to `directory`."""
    if name == "adapters":
        made = (
            make_adapter(directory / of, SHIPPED_MODEL, seed, rank=rank)
            for seed, (of, rank) in enumerate((("a", 4), ("b", 9)))
        )
        return Kind(name, SHIPPED_MODEL, tuple(made))
    if name == "experts":
        return Kind(name, with_experts(SHIPPED_MODEL, directory / "experts"))
    kv_dtype = name.removesuffix(" KV") if name.endswith(" KV") else "auto"
    return Kind(
        *(name, SHIPPED_MODEL),
        kv_dtype=kv_dtype,
        has_drafts=name == "drafts",
        is_served=name == "swaps and forks",
    )


@torch.inference_mode()
def compare(given: argparse.Namespace) -> Results:
    torch.set_num_threads(1)  # the model is so small that threads would only wait for each other
    table = Rows(given.json)
    if given.processes > 1:
        compare_in_processes(given, table)
    else:
        comparison = Comparison(given, table)
        with tempfile.TemporaryDirectory() as root:
            for name in given.kinds:
                try:
                    kind = make_kind(name, Path(root))
                except Exception as error:  # noqa: BLE001  the other kinds go on
                    table.rows[f"{name}, float32"] = {"error": reason(error)}
                    continue
                comparison.compare(kind)
                if name == "plain":
                    comparison.compare_with_transformers(kind)
    results = {"wrong_float32": wrong_float32(table), "failed": len(table.errors)}
    table.write(**results)
    return results | {"rows": table.rows}


def compare_in_processes(given: argparse.Namespace, table: Rows) -> None:
    """Compare the kinds in several processes, because each kind compiles its own kernels."""
    groups = [given.kinds[first :: given.processes] for first in range(given.processes)]
    with tempfile.TemporaryDirectory() as root:
        running = []
        for number, kinds in enumerate(filter(None, groups)):
            file = Path(root) / f"{number}.json"
            command = [
                *(sys.executable, "-m", "gpu.exact", "--kinds", ",".join(kinds)),
                *("--device", given.device, "--rows", str(given.rows)),
                *("--tokens", str(given.tokens), "--json", str(file)),
            ]
            running.append((kinds, file, subprocess.Popen(command)))
        try:
            while True:
                is_over = all(process.poll() is not None for *_, process in running)
                for _, file, _ in running:
                    if file.exists():
                        table.rows.update(json.loads(file.read_text())["rows"])
                table.write(wrong_float32=wrong_float32(table))
                if is_over:
                    break
                time.sleep(_POLL_S)
        finally:
            for *_, process in running:
                process.kill()
    for kinds, _, process in running:
        for name in kinds:
            has_rows = any(row.startswith(f"{name}, ") for row in table.rows)
            if not has_rows or process.returncode not in _ENDED:
                error = f"its process ended with {process.returncode}"
                table.rows[f"{name}, float32"] = {"error": error}


if __name__ == "__main__":
    parser = arguments(__doc__, quick="has no effect")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each row")
    parser.add_argument("--kinds", type=lambda text: tuple(text.split(",")), default=KINDS)
    parser.add_argument("--processes", type=int, default=1, help="share the kinds among so many")
    results = main(parser.parse_args(), compare)
    sys.exit(1 if results["wrong_float32"] or results["failed"] else 0)
