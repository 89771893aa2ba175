"""A LoRA adapter in memory: low-rank additions to the linear maps of a decoder.

Symbols: `T` tokens, `K` input features of a map, `N` its output features, `R` the sum of the ranks
of maps that are fused into one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from contract.lora import LoraAdapter
from gpu_worker.lora.adapted_maps import ATTENTION_OUTPUT, DOWN, GATE_UP, QKV, MapName
from gpu_worker.models.decoder_layer import LayerT
from gpu_worker.models.feed_forward import FeedForward, GatedMlp
from gpu_worker.models.layer_norm.decoder import Mlp
from gpu_worker.ranks.collectives import SummedMap
from gpu_worker.weights.linear import Linear
from kernels.cpu.linear import PackedLinear
from kernels.cpu.program.low_rank import NativeAdapter, PackedPair


@dataclass(frozen=True, slots=True, eq=False)
class LowRankMap:
    """The addition to one map: B A x, scaled."""

    down: Linear
    """A: K to R; R is even."""
    up: Linear
    """B, scaled: R to N. If the map fuses q, k and v, each column of B adds to only one of the
    three."""
    num_ranks: int
    """R."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, K]` to `[T, N]`, row by row."""
        return self.up(self.down(x))


def with_maps(layer: LayerT, change: Callable[[MapName, Linear], Linear]) -> LayerT:
    """Copy the layer, with `change` applied to each map. Experts stay as they are.

    If a map is a `SummedMap`, whose result is a sum over devices, `change` is applied to this
    device's part of the map. So what `change` adds to this device's result is also in the sum.
    """
    return replace(
        layer,
        qkv=change(QKV, layer.qkv),
        attention_output=_within(
            layer.attention_output, lambda part: change(ATTENTION_OUTPUT, part)
        ),
        feed_forward=_within(layer.feed_forward, lambda part: _mlp_with_maps(part, change)),
    )


def _mlp_with_maps(mlp: FeedForward, change: Callable[[MapName, Linear], Linear]) -> FeedForward:
    if isinstance(mlp, GatedMlp):
        return replace(mlp, gate_up=change(GATE_UP, mlp.gate_up), down=change(DOWN, mlp.down))
    if isinstance(mlp, Mlp):
        return replace(mlp, up=change(GATE_UP, mlp.up), down=change(DOWN, mlp.down))
    return mlp


def _within(whole: FeedForward, change: Callable[[FeedForward], FeedForward]) -> FeedForward:
    """Apply `change` to a map, or to the `part` of a `SummedMap`."""
    if isinstance(whole, SummedMap):
        return replace(whole, part=change(whole.part))
    return change(whole)


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter. Immutable."""

    id: LoraAdapter
    layers: tuple[Mapping[MapName, LowRankMap], ...]
    """The additions of each layer, by map."""
    native: NativeAdapter | None = None
    """The result of `native_adapter` for `layers`."""
    max_ranks: int = 0
    """The largest R of any map in the whole model, so it is the same on all devices, while `layers`
    has only this device's layers."""


def native_adapter(layers: Sequence[Mapping[MapName, LowRankMap]]) -> NativeAdapter | None:
    """Pack an adapter's low-rank maps, given for each layer, for `NativeDecoder`.

    Returns None if `NativeDecoder` has no code for one of the low-rank maps.
    """
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
