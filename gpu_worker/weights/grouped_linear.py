"""The maps of a layer's experts on a GPU, multiplied by one kernel.

Symbols: `R` rows that are mapped, `X` maps, `K` input features, `N` output features, `G` groups of
input features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from gpu_worker.weights.gpu_linear import QuantizedLinear, ScaledLinear
from gpu_worker.weights.linear import Linear, PlainLinear
from kernels import ops
from kernels.grouped_maps import GroupedMaps

GroupedLinear: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, int], torch.Tensor
]
"""Maps rows of `[*, K]` to `[R, N]`; takes x, ends, sources, places and R, as `ops.grouped_linear`
does. The host never waits for the device."""


@dataclass(frozen=True, slots=True, eq=False)
class PlainGroup:
    """Several maps with 16- or 32-bit weights, multiplied by one kernel."""

    maps: GroupedMaps

    def __call__(
        self,
        x: torch.Tensor,
        ends: torch.Tensor,
        sources: torch.Tensor | None,
        places: torch.Tensor | None,
        num_rows: int,
    ) -> torch.Tensor:
        """See `GroupedLinear`."""
        return ops.grouped_linear(x, self.maps, ends, sources, places, num_rows, None)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedGroup:
    """Several maps with weights of 8 or 4 bits; see `ops.grouped_quantized_linear`."""

    values: torch.Tensor
    """`[X, K, N]`, or `[X, K / 2, N]` at 4 bits."""
    scales: torch.Tensor
    """`[X, G, N]`"""
    offsets: torch.Tensor | None
    bias: torch.Tensor | None
    """`[X, N]`"""

    def __call__(
        self,
        x: torch.Tensor,
        ends: torch.Tensor,
        sources: torch.Tensor | None,
        places: torch.Tensor | None,
        num_rows: int,
    ) -> torch.Tensor:
        """See `GroupedLinear`."""
        return ops.grouped_quantized_linear(
            *(x, self.values, self.scales, self.offsets, ends, sources, places, num_rows),
            bias=self.bias,
        )


def group(linears: Sequence[Linear]) -> GroupedLinear | None:
    """Make one map of several; return None if no kernel multiplies them together.

    Weights of 16 or 32 bits stay where they are, and quantized weights are copied. Fp8 weights are
    multiplied as 16-bit numbers, and activations are not rounded to fp8.
    """
    plain = [each for each in linears if isinstance(each, PlainLinear)]
    if len(plain) == len(linears):
        if len({each.bias is None for each in plain}) > 1:
            return None
        return PlainGroup(GroupedMaps.of([each.weight for each in plain], _biases(plain)))
    quantized = [each for each in map(_as_quantized, linears) if each is not None]
    kinds = {
        (x.values.shape, x.values.dtype, x.scales.shape, x.scales.dtype, x.bias is None)
        for x in quantized
    }
    if len(quantized) < len(linears) or len(kinds) > 1:
        return None
    offsets = None
    if any(each.offsets is not None for each in quantized):
        offsets = torch.stack(
            [torch.zeros_like(x.scales) if x.offsets is None else x.offsets for x in quantized]
        )
    values = torch.stack([each.values for each in quantized])
    scales = torch.stack([each.scales for each in quantized])
    return QuantizedGroup(values, scales, offsets, _biases(quantized))


def _biases(linears: Sequence[PlainLinear | QuantizedLinear]) -> torch.Tensor | None:
    """Stack the biases of `linears` to `[X, N]`; None: no map has a bias.

    Either all maps have a bias, or none has.
    """
    biases = [each.bias for each in linears if each.bias is not None]
    return torch.stack(biases) if biases else None


def _as_quantized(linear: Linear) -> QuantizedLinear | None:
    if isinstance(linear, ScaledLinear):
        return QuantizedLinear(linear.weight.t(), linear.scales, None, linear.bias)
    if isinstance(linear, QuantizedLinear) and not linear.has_one_tile:
        return linear
    return None
