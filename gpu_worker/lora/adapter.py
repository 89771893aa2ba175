"""A LoRA adapter in memory: what it adds to each linear map of a decoder.

Symbols: `T` tokens, `K` input features, `N` output features, `R` ranks of the maps fused into one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gpu_worker.lora.adapted_maps import MapName
from gpu_worker.lora.adapter_id import AdapterId
from gpu_worker.weights.linear import Linear
from kernels.cpu.linear import PackedLinear
from kernels.cpu.program.low_rank import NativeAdapter, PackedPair


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

    id: AdapterId
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
