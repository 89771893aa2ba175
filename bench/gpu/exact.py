"""Compares a GPU's tokens with the plain code's, for each way to compute a step.

    python -m gpu.exact --json out.json    (in bench/, as gpu.sh does)

Each row of the table is a kind of worker: plain, with LoRA adapters, with experts, with a draft
model, with quantized KV. Its tokens are compared with those of a plain worker on the CPU: computed
eagerly (`eager`), and by CUDA graphs of decodes and of pieces (`graphs`). Prompts of different
lengths start one after another, so steps are prompts, decodes, and both. Half of the rows are
greedy, half draw.

In float32 all must be equal: `wrong` counts the tokens that differ, and the exit status is 1. Two
comparisons do not count: quantized KV, because the last bit of a number may decide its rounding;
and bfloat16, in which graphs are compared with eager steps of the same device, because products of
different numbers of rows may differ in the last bits.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from harness.case import SHIPPED_MODEL, Results, Table, arguments, main
from safetensors.torch import load_file, save_file

from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan, StepId
from contract.worker_limits import Limits
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.kv.layout import kv_dtypes
from gpu_worker.lora.adapter_files import load_adapter
from gpu_worker.lora.slots import AdapterSlots
from gpu_worker.models.llama_config import LlamaConfig
from gpu_worker.models.registry import open_model
from gpu_worker.speculative.draft_model import ModelDrafter
from gpu_worker.step.executor import Executor
from gpu_worker.step.graphs.cuda_graphs import Between, CudaGraphs, GraphBackend
from tests.lora_fixture import make_adapter

CPU = torch.device("cpu")
_BLOCK_SIZE, _CHUNK, _NUM_EXPERTS = 16, 24, 4
_LIMITS = Limits(
    max_num_seqs=16,
    max_model_len=256,
    max_num_batched_tokens=256,
    num_blocks=16 * 256 // _BLOCK_SIZE,
    block_size=_BLOCK_SIZE,
    vocab_size=0,
)


@dataclass(frozen=True)
class Kind:
    """A kind of worker."""

    name: str
    model: Path
    adapters: tuple[Path, ...] = ()
    has_drafts: bool = False
    kv_dtype: str = "auto"


class ComputedAgain:
    """A `GraphBackend` for the smoke test: a replay computes."""

    def capture(self, compute: Callable[[Between], None]) -> Callable[[], object]:
        compute(lambda work: work())
        return lambda: compute(lambda work: work())

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def with_experts(model: Path, directory: Path) -> Path:
    """Write the model with experts in place of each MLP: the MLP, and slightly different ones."""
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
) -> Executor:
    source = open_model(kind.model)
    config, model = source.config, source.load(dtype, device, lambda _: None)
    loaded = [load_adapter(each.name, each, config, dtype, device) for each in kind.adapters]
    adapters = dict(enumerate(loaded, start=1))
    limits = replace(
        _LIMITS,
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
        assert isinstance(config, LlamaConfig)
        slots = AdapterSlots(config, device)
    executor = Executor(
        model,
        pool(kind.kv_dtype),
        limits,
        (),
        device,
        drafter=drafter,
        adapters=adapters,
        slots=slots,
    )
    if backend is not None:
        for has_adapters in (False, True) if slots is not None else (False,):
            if drafter is None:  # else tokens come from the host
                executor.capture_decodes(backend, lambda _: None, has_adapters=has_adapters)
            executor.capture_pieces(backend, lambda _: None, has_adapters=has_adapters)
        if drafter is not None:
            drafter.capture_decodes(backend, lambda _: None)
            drafter.capture_pieces(backend, lambda _: None)
    return executor


def generate(executor: Executor, kind: Kind, num_rows: int, num_tokens: int) -> list[list[int]]:
    """Return the tokens of each row; a row starts every second step, in chunks."""
    lens = [1 + row * 29 % 90 for row in range(num_rows)]
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
                        token_ids=np.arange(lens[row], dtype=np.int32) * 7 % 900 + row + 2,
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
    pairs = zip(outputs, expected, strict=True)
    return sum(a != b for each, other in pairs for a, b in zip(each, other, strict=True))


@torch.inference_mode()
def compare(given: argparse.Namespace) -> Results:
    device = torch.device(given.device)
    backend: GraphBackend = CudaGraphs(device) if device.type == "cuda" else ComputedAgain()
    results: dict[str, int] = {}
    table = Table("worker:<10", "dtype:<9", "computed:<9", "compared with:<12", "wrong:d", "of:d")
    size = given.rows, given.tokens
    with tempfile.TemporaryDirectory() as root:
        directory = Path(root)
        adapters = tuple(
            make_adapter(directory / name, SHIPPED_MODEL, seed, rank=rank)
            for seed, (name, rank) in enumerate((("a", 4), ("b", 9)))
        )
        kinds = [
            Kind("plain", SHIPPED_MODEL),
            Kind("adapters", SHIPPED_MODEL, adapters),
            Kind("experts", with_experts(SHIPPED_MODEL, directory / "experts")),
            Kind("drafts", SHIPPED_MODEL, has_drafts=True),
            Kind("int8 KV", SHIPPED_MODEL, kv_dtype="int8"),
            Kind("fp8 KV", SHIPPED_MODEL, kv_dtype="fp8"),
        ]

        def row(kind: Kind, dtype: torch.dtype, of: str, than: str, wrong: int) -> None:
            name = str(dtype).removeprefix("torch.")
            table.row(kind.name, name, of, than, wrong, given.rows * given.tokens)
            results[f"{kind.name}_{name}_{of}_wrong".replace(" ", "_")] = wrong

        for kind in kinds:
            plain = make_executor(replace(kind, has_drafts=False), torch.float32, CPU, None)
            expected = generate(plain, kind, *size)
            eager = generate(make_executor(kind, torch.float32, device, None), kind, *size)
            row(kind, torch.float32, "eager", "the CPU", num_wrong(eager, expected))
            graphs = generate(make_executor(kind, torch.float32, device, backend), kind, *size)
            row(kind, torch.float32, "graphs", "the CPU", num_wrong(graphs, expected))
            if device.type == "cuda":
                eager = generate(make_executor(kind, torch.bfloat16, device, None), kind, *size)
                graphs = generate(make_executor(kind, torch.bfloat16, device, backend), kind, *size)
                row(kind, torch.bfloat16, "graphs", "eager", num_wrong(graphs, eager))
    results["wrong_float32"] = sum(
        wrong for name, wrong in results.items() if "float32" in name and "KV" not in name
    )
    return results


if __name__ == "__main__":
    parser = arguments(__doc__, quick="has no effect")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each row")
    sys.exit(1 if main(parser.parse_args(), compare)["wrong_float32"] else 0)
