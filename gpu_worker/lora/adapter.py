"""A LoRA adapter in memory: what it adds to each linear map of a decoder.

Symbols: `T` tokens, `K` input features, `N` output features, `R` ranks of the maps fused into one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gpu_worker.lora.adapted_maps import MapName
from gpu_worker.lora.adapter_id import AdapterId
from gpu_worker.models.linear import Linear


@dataclass(frozen=True, slots=True, eq=False)
class LowRankMap:
    """What is added to one map: B A x, scaled."""

    down: Linear
    """A: K to R."""
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
