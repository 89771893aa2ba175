"""Compares a service with the machine's limits on memory reads and on arithmetic (a roofline)."""

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from harness.closed_loop import LoadResult, Workload, run_load
from harness.processes import BENCH, run_script

_PROMPT_LEN = 512
_NUM_PROMPTS = 6


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Bytes and operations per token, computed from a model's files."""

    weight_bytes: int
    """The bytes that each decode step reads: all weights but the embedding."""
    layer_parameters: int
    """Elements of the matrices by which each token is multiplied, without the last matrix."""
    head_parameters: int
    """Elements of the last matrix, by which only a prompt's last token is multiplied."""
    attention_per_token: int
    """Operations of a query for each token that it attends to."""

    @classmethod
    def of(cls, directory: Path) -> "ModelCost":
        """Compute the costs from the sizes of the weights; the weights are not read."""
        config = json.loads((directory / "config.json").read_text())
        sizes: dict[str, tuple[int, int]] = {}  # parameters, bytes
        for path in directory.glob("*.safetensors"):
            with path.open("rb") as file:
                (header_len,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(header_len))
            for name, tensor in header.items():
                if name != "__metadata__":
                    start, end = tensor["data_offsets"]
                    sizes[name] = prod(tensor["shape"]), end - start
        embedding = next(size for name, size in sizes.items() if "embed_tokens" in name)
        head = sizes.get("lm_head.weight", embedding)
        layers = [
            s for name, s in sizes.items() if "embed_tokens" not in name and "lm_head" not in name
        ]
        num_heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
        return cls(
            weight_bytes=sum(num_bytes for _, num_bytes in layers) + head[1],
            layer_parameters=sum(count for count, _ in layers),
            head_parameters=head[0],
            attention_per_token=4 * config["num_hidden_layers"] * num_heads * head_dim,
        )

    def prefill_flops(self, num_tokens: int) -> float:
        """Return the operations for a prompt and its first token; causality halves attention."""
        attention = self.attention_per_token * num_tokens**2 / 2
        return 2 * (self.layer_parameters * num_tokens + self.head_parameters) + attention


async def measure_shares(
    base_url: str, model: str, directory: Path, alone: LoadResult | None, num_threads: int
) -> dict[str, float]:
    """Print and return the shares of the machine's limits that decodes and prompts reach.

    The limits are measured while the service is idle.

    Args:
        base_url: The service's URL.
        model: The name of the service's model.
        directory: The directory of the service's model.
        alone: The measured load of one stream; None if it was not measured.
        num_threads: Threads of the worker.
    """
    cost = ModelCost.of(directory)
    output = await run_script(str(BENCH / "ceilings.py"), f"--num-threads={num_threads}")
    ceilings = json.loads(output.splitlines()[-1])
    workload = Workload(model=model, num_prompts=_NUM_PROMPTS, input_len=_PROMPT_LEN, output_len=1)
    prompts = await run_load(base_url, workload, concurrency=1)
    flops = cost.prefill_flops(_PROMPT_LEN) / (prompts.ttft_p50_ms / 1e3)
    metrics = {
        "read_gb_s": ceilings["read_bytes_per_s"] / 1e9,
        "bf16_gflops": ceilings["bf16_flops"] / 1e9,
        "prefill_flops_share": flops / ceilings["bf16_flops"],
    }
    print(
        f"a prompt of {_PROMPT_LEN} tokens: {prompts.ttft_p50_ms:.0f} ms, "
        f"{flops / 1e9:.0f} of {metrics['bf16_gflops']:.0f} GFLOP/s"
    )
    if alone is not None:
        read = cost.weight_bytes / (alone.tpot_mean_ms / 1e3)
        metrics["bandwidth_share_b1"] = read / ceilings["read_bytes_per_s"]
        print(
            f"one stream: {alone.tpot_mean_ms:.1f} ms per token, "
            f"{read / 1e9:.1f} of {metrics['read_gb_s']:.1f} GB/s"
        )
    return metrics
