"""Compares what a service does with what the machine can: the roofline, at its two ends."""

import asyncio
import json
import struct
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path

from load import LoadResult, Workload, run_load

_BENCH = Path(__file__).parent
_PROMPT_LEN = 512
_NUM_PROMPTS = 6


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a token costs, from a model's directory."""

    weight_bytes: int
    """Of all that each decode step reads: everything but the embedding."""
    layer_parameters: int
    """Of the matrices that each token is multiplied by, but for the last one."""
    head_parameters: int
    """Of the one that only the last token of a prompt is multiplied by."""
    attention_per_token: int
    """Operations of a query for each token that it looks at."""

    @classmethod
    def of(cls, directory: Path) -> "ModelCost":
        """Read the sizes of the weights, not the weights."""
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
        others = [
            s for name, s in sizes.items() if "embed_tokens" not in name and "lm_head" not in name
        ]
        num_heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
        return cls(
            weight_bytes=sum(num_bytes for _, num_bytes in others) + head[1],
            layer_parameters=sum(count for count, _ in others),
            head_parameters=head[0],
            attention_per_token=4 * config["num_hidden_layers"] * num_heads * head_dim,
        )

    def prefill_flops(self, num_tokens: int) -> float:
        """Operations of computing a prompt and its first token; the mask halves the attention."""
        attention = self.attention_per_token * num_tokens**2 / 2
        return 2 * (self.layer_parameters * num_tokens + self.head_parameters) + attention


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What `ceilings.py` says."""

    read_bytes_per_s: float
    bf16_flops: float


async def measure_shares(
    base_url: str, model: str, directory: Path, alone: LoadResult | None, num_threads: int
) -> dict[str, float]:
    """Measure the machine while the service is idle, then prompts; print, and give the shares.

    Args:
        base_url: The service's.
        model: Its model's name.
        directory: The model's.
        alone: What one stream was measured to do; None: it was not.
        num_threads: Of the worker.
    """
    cost = ModelCost.of(directory)
    ceilings = await _ceilings(num_threads)
    workload = Workload(model=model, num_prompts=_NUM_PROMPTS, input_len=_PROMPT_LEN, output_len=1)
    prompts = await run_load(base_url, workload, concurrency=1)
    prefill_flops = cost.prefill_flops(_PROMPT_LEN) / (prompts.ttft_p50_ms / 1e3)
    metrics = {
        "read_gb_s": ceilings.read_bytes_per_s / 1e9,
        "bf16_gflops": ceilings.bf16_flops / 1e9,
        "prefill_flops_share": prefill_flops / ceilings.bf16_flops,
    }
    print(
        f"a prompt of {_PROMPT_LEN} tokens: {prompts.ttft_p50_ms:.0f} ms, "
        f"{prefill_flops / 1e9:.0f} of {metrics['bf16_gflops']:.0f} GFLOP/s"
    )
    if alone is not None:
        read = cost.weight_bytes / (alone.tpot_mean_ms / 1e3)
        metrics["bandwidth_share_b1"] = read / ceilings.read_bytes_per_s
        print(
            f"one stream: {alone.tpot_mean_ms:.1f} ms per token, "
            f"{read / 1e9:.1f} of {metrics['read_gb_s']:.1f} GB/s"
        )
    return {name: round(value, 4) for name, value in metrics.items()}


async def _ceilings(num_threads: int) -> Ceilings:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(_BENCH / "ceilings.py"), "--num-threads", str(num_threads)),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"ceilings.py ended with {process.returncode}")
    return Ceilings(**json.loads(out))
