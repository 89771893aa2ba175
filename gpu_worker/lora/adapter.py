"""A LoRA adapter in memory: low-rank additions to the linear maps of a decoder.

Symbols: `T` tokens, `K` input features, `N` output features, `R` ranks of the maps fused into one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from contract.lora import LoraAdapter
from gpu_worker.models.decoder_layer import DecoderLayer
from gpu_worker.models.feed_forward import GatedMlp
from gpu_worker.models.llama.config import LlamaConfig
from gpu_worker.weights.linear import Linear
from kernels.cpu.linear import PackedLinear
from kernels.cpu.program.low_rank import MAPS, NativeAdapter, PackedPair

MapName: TypeAlias = str
"""A linear map of the decoder: one of the four below."""

QKV, ATTENTION_OUTPUT, GATE_UP, DOWN = MAPS


@dataclass(frozen=True, slots=True)
class AdaptedMap:
    """One linear map of a layer: one or several maps of the checkpoint, with joined outputs."""

    name: MapName
    num_in: int
    modules: tuple[tuple[str, int], ...]
    """Name in the checkpoint and number of outputs of each map."""


def adapted_maps(config: LlamaConfig, layer: int) -> Iterator[AdaptedMap]:
    """Yield the maps of a layer that adapters may change. Maps of experts are not among them."""
    prefix = f"model.layers.{layer}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    qkv: tuple[tuple[str, int], ...] = (
        (f"{attention}.q_proj", query_size),
        (f"{attention}.k_proj", kv_size),
        (f"{attention}.v_proj", kv_size),
    )
    gate_up: tuple[tuple[str, int], ...] = (
        (f"{mlp}.gate_proj", intermediate),
        (f"{mlp}.up_proj", intermediate),
    )
    if config.has_fused_qkv:
        qkv = ((f"{attention}.qkv_proj", query_size + 2 * kv_size),)
    if config.has_fused_gate_up:
        gate_up = ((f"{mlp}.gate_up_proj", 2 * intermediate),)
    yield AdaptedMap(QKV, hidden, qkv)
    yield AdaptedMap(ATTENTION_OUTPUT, query_size, ((f"{attention}.o_proj", hidden),))
    if config.experts is None or not config.experts.layers[layer]:
        yield AdaptedMap(GATE_UP, hidden, gate_up)
        yield AdaptedMap(DOWN, intermediate, ((f"{mlp}.down_proj", hidden),))


@dataclass(frozen=True, slots=True, eq=False)
class LowRankMap:
    """The addition to one map: B A x, scaled."""

    down: Linear
    """A: K to R; R is even."""
    up: Linear
    """B, scaled: R to N. In a fused map, each part reads its own ranks."""
    num_ranks: int
    """R."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, K]` to `[T, N]`, row by row."""
        return self.up(self.down(x))


def with_maps(layer: DecoderLayer, change: Callable[[MapName, Linear], Linear]) -> DecoderLayer:
    """Copy the layer, with `change` applied to each map. Experts stay as they are."""
    mlp = layer.feed_forward
    if isinstance(mlp, GatedMlp):
        mlp = replace(mlp, gate_up=change(GATE_UP, mlp.gate_up), down=change(DOWN, mlp.down))
    return replace(
        layer,
        qkv=change(QKV, layer.qkv),
        attention_output=change(ATTENTION_OUTPUT, layer.attention_output),
        feed_forward=mlp,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter. Immutable."""

    id: LoraAdapter
    layers: tuple[Mapping[MapName, LowRankMap], ...]
    """The additions of each layer, by map."""
    native: NativeAdapter | None = None
    """The additions, packed for the native decoder; None if it has no code for one of them."""


def native_adapter(layers: Sequence[Mapping[MapName, LowRankMap]]) -> NativeAdapter | None:
    """Pack the layers' additions for the native decoder; None if it has no code for one of them."""
    packed: list[dict[str, PackedPair]] = []
    for layer in layers:
        pairs: dict[str, PackedPair] = {}
        for name, low_rank in layer.items():
            down, up = low_rank.down, low_rank.up
            if not (isinstance(down, PackedLinear) and isinstance(up, PackedLinear)):
                return None
            if down.dtype is not torch.bfloat16:
                return None
            pairs[name] = down, up
        packed.append(pairs)
    return NativeAdapter(packed)
