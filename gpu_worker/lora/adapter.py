"""A LoRA adapter in memory: what it adds to each linear map of a decoder.

Symbols: `T` tokens, `K` input features, `N` output features, `R` ranks of the maps fused into one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from contract.lora import LoraAdapter
from gpu_worker.models.llama_config import LlamaConfig
from gpu_worker.weights.linear import Linear
from kernels.cpu.linear import PackedLinear
from kernels.cpu.program.low_rank import MAPS, NativeAdapter, PackedPair

MapName: TypeAlias = str
"""Of a map as the decoder has it, one of these."""

QKV, ATTENTION_OUTPUT, GATE_UP, DOWN = MAPS


@dataclass(frozen=True, slots=True)
class AdaptedMap:
    """One map of a layer: several of the checkpoint's, whose outputs are joined."""

    name: MapName
    num_in: int
    modules: tuple[tuple[str, int], ...]
    """Of each of them the name in the checkpoint and how many outputs it has."""


def adapted_maps(config: LlamaConfig, layer: int) -> Iterator[AdaptedMap]:
    """What adapters may add to in a layer; of a mixture of experts, attention alone."""
    prefix = f"model.layers.{layer}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    yield AdaptedMap(
        QKV,
        hidden,
        (
            (f"{attention}.q_proj", query_size),
            (f"{attention}.k_proj", kv_size),
            (f"{attention}.v_proj", kv_size),
        ),
    )
    yield AdaptedMap(ATTENTION_OUTPUT, query_size, ((f"{attention}.o_proj", hidden),))
    if config.experts is None:
        yield AdaptedMap(
            GATE_UP,
            hidden,
            ((f"{mlp}.gate_proj", intermediate), (f"{mlp}.up_proj", intermediate)),
        )
        yield AdaptedMap(DOWN, intermediate, ((f"{mlp}.down_proj", hidden),))


@dataclass(frozen=True, slots=True, eq=False)
class LowRankMap:
    """What is added to one map: B A x, scaled."""

    down: Linear
    """A: K to R, an even number."""
    up: Linear
    """B, scaled: R to N; of fused maps each reads its own ranks."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, K]` to `[T, N]`, row by row."""
        return self.up(self.down(x))


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter; it never changes."""

    id: LoraAdapter
    layers: tuple[Mapping[MapName, LowRankMap], ...]
    """Of each layer the maps it adds to."""
    native: NativeAdapter | None = None
    """The same for a native decoder; None: it has no code for them."""


def native_adapter(layers: Sequence[Mapping[MapName, LowRankMap]]) -> NativeAdapter | None:
    """What native code takes of an adapter's layers, if it takes all of them."""
    packed: list[dict[str, PackedPair]] = []
    for layer in layers:
        pairs: dict[str, PackedPair] = {}
        for name, low_rank in layer.items():
            down, up = low_rank.down, low_rank.up
            if not (isinstance(down, PackedLinear) and isinstance(up, PackedLinear)):
                return None
            pairs[name] = down, up
        packed.append(pairs)
    return NativeAdapter(packed)
