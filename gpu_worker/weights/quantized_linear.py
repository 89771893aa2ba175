"""Linear maps with 8- or 4-bit integer weights, quantized when a model is loaded.

Symbols: `T` tokens, `K` input features, `N` output features, `G` groups of input features.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

import torch
from torch.nn import functional

from gpu_worker.weights.linear import Linear
from kernels.cpu import quantized as native

_INT4_GROUP_SIZES: Final = (64, 32)
"""The first that divides K is used: 4.5 or 5 bits per weight, with 16-bit scales and offsets."""
_INT4_KERNEL_GROUPS: Final = (32, 64, 128)
_INT4_RANGES: Final = (1.0, 0.85)
"""Shares of the values' range: all of it, which keeps weights that are on a grid already; and less,
because outliers are few and a finer grid suits the rest. Each group takes the better."""
_INT4_FITS: Final = 2
_PIECE: Final = 2**18
"""Weights fitted at a time, to stay within a cache."""
_TORCH_PANEL: Final = 16
"""Torch's 4-bit layout needs a multiple of this many output features."""


class Quantization(Enum):
    """How weights of linear maps are stored."""

    INT8 = "int8"
    """One scale per output feature, no offset."""
    INT4 = "int4"
    """A scale and an offset per output feature and 64 (else 32) input features."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight `[N, K]` as integers: `values * scale + offset`."""

    quantization: Quantization
    values: torch.Tensor
    """int8[N, K] in [-127, 127], or in [-8, 7] for 4 bits."""
    scales: torch.Tensor
    """`[N, G]` of the activations' dtype, each for K / G values of a row."""
    offsets: torch.Tensor | None
    """As the scales; None: zeros."""

    def dequantized(self) -> torch.Tensor:
        """The weight, unrounded: float32 `[N, K]`."""
        by_group = self.values.float().view(*self.scales.shape, -1)
        weight = by_group * self.scales.float().unsqueeze(2)
        if self.offsets is not None:
            weight += self.offsets.float().unsqueeze(2)
        return weight.view(self.values.shape)

    def without_zero_offsets(self) -> "QuantizedWeight":
        """The same with all-zero offsets replaced by None; only 8-bit weights can do without."""
        if self.quantization is Quantization.INT4 or self.offsets is None or self.offsets.any():
            return self
        return replace(self, offsets=None)


def can_quantize(num_in: int, quantization: Quantization) -> bool:
    """Whether weights with K input features can be quantized so."""
    return quantization is Quantization.INT8 or num_in % _INT4_GROUP_SIZES[-1] == 0


def quantize(weight: torch.Tensor, quantization: Quantization) -> QuantizedWeight:
    """Round a weight `[N, K]` to integers; requires `can_quantize`."""
    if quantization is Quantization.INT8:
        largest = weight.abs().amax(1, keepdim=True).float()
        scales = _no_zeros((largest / 127).to(weight.dtype))
        values = (weight.float() / scales.float()).round_().clamp_(-127, 127)
        return QuantizedWeight(quantization, values.to(torch.int8), scales, None)
    pieces = torch.split(weight, max(1, _PIECE // weight.shape[1]))
    values, scales, offsets = map(torch.cat, zip(*map(_quantize_int4, pieces), strict=True))
    return QuantizedWeight(quantization, values, scales, offsets)


def _quantize_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, scales and offsets of some rows."""
    size = next(size for size in _INT4_GROUP_SIZES if weight.shape[1] % size == 0)
    groups = weight.float().view(weight.shape[0], -1, size)  # [N, G, size]
    (scales, offsets, errors), other = (_fit_int4(groups, share) for share in _INT4_RANGES)
    is_better = other[2] < errors
    scales = _no_zeros(torch.where(is_better, other[0], scales).to(weight.dtype))
    offsets = torch.where(is_better, other[1], offsets).to(weight.dtype)
    values = _round_int4(groups, scales.float(), offsets.float()).to(torch.int8).flatten(1)
    return values, scales.squeeze(2), offsets.squeeze(2)


def _fit_int4(
    groups: torch.Tensor, range_share: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scale, offset and squared error of each group of `[N, G, size]`; float32 `[N, G, 1]` each.

    Starts with a grid over a share of the values' range, then fits values to integers by least
    squares.
    """
    low, high = (range_share * bound for bound in groups.aminmax(dim=2, keepdim=True))
    scales = _no_zeros((high - low) / 15)
    offsets = low + 8 * scales
    mean = groups.mean(2, keepdim=True)
    for _ in range(_INT4_FITS):
        values = _round_int4(groups, scales, offsets)
        centre = values.mean(2, keepdim=True)
        values -= centre
        covariance = (values * groups).sum(2, keepdim=True)
        scales = _no_zeros(covariance / values.square_().sum(2, keepdim=True))
        offsets = mean - scales * centre
    lost = _round_int4(groups, scales, offsets).mul_(scales).add_(offsets).sub_(groups)
    return scales, offsets, lost.square_().sum(2, keepdim=True)


def _round_int4(groups: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return ((groups - offsets) / scales).round_().clamp_(-8, 7)


def can_multiply(weight: QuantizedWeight) -> bool:
    """Whether `make_quantized_linear` supports this weight.

    4-bit groups must have 32, 64 or 128 input features. Torch's 8-bit operators have no groups.
    """
    num_groups = weight.scales.shape[1]
    if weight.quantization is Quantization.INT4:
        return weight.values.shape[1] // num_groups in _INT4_KERNEL_GROUPS
    return has_kernel(weight) or (num_groups == 1 and weight.offsets is None)


def has_kernel(weight: QuantizedWeight) -> bool:
    """Whether `make_quantized_linear` uses our own kernel for this weight."""
    return native.can_pack(weight.values, weight.scales.dtype)


def make_quantized_linear(weight: QuantizedWeight, bias: torch.Tensor | None) -> Linear:
    """The map `x @ weight.T + bias` in the CPU's fastest form.

    Our own kernel for bfloat16, else torch's packed operators. With ours, a row's result does not
    depend on the number of rows.

    Args:
        weight: The caller need not keep it.
        bias: `[N]`, of the activations' dtype.
    """
    values, scales, offsets = weight.values, weight.scales, weight.offsets
    if has_kernel(weight):
        bits = 8 if weight.quantization is Quantization.INT8 else 4
        return native.pack(bits, values, scales, offsets, bias)
    if offsets is None:
        return _torch_int8(values, scales.flatten(), bias)
    return _torch_int4(values, scales, offsets, bias)


def _torch_int8(values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    apply = torch.ops.aten._weight_int8pack_mm.default  # noqa: SLF001  no public name

    def linear(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = apply(x.contiguous(), values, scales)
        return out if bias is None else out + bias

    return linear


def _torch_int4(
    values: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None
) -> Linear:
    num_out, num_in = values.shape
    missing = (0, 0, 0, -num_out % _TORCH_PANEL)
    nibbles = functional.pad(values, missing).to(torch.int32) + 8
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles, 1)  # noqa: SLF001
    both = [functional.pad(part, missing).t() for part in (scales, offsets)]
    scales_and_offsets = torch.stack(both, dim=2).contiguous()  # [G, N, 2]
    group_size = num_in // scales.shape[1]
    apply = torch.ops.aten._weight_int4pack_mm_for_cpu.default  # noqa: SLF001

    def linear(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = apply(x.contiguous(), packed, group_size, scales_and_offsets)
        out = out[:, :num_out]
        return out if bias is None else out + bias

    return linear


def _no_zeros(scales: torch.Tensor) -> torch.Tensor:
    """Replace scales of 0 or NaN, which occur where all weights are equal: any other will do."""
    return torch.where(scales > 0, scales, 1.0)
