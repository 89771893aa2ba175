"""Linear maps with integer weights of 8 or 4 bits: quantizes weights, and makes maps of them.

Symbols: `T` tokens, `K` input features, `N` output features, `G` groups of input features.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

import torch

from gpu_worker.weights import gpu_linear
from gpu_worker.weights.linear import Linear, make_linear
from kernels.cpu import linear as native

_INT4_GROUP_SIZE: Final = 32
"""With groups of this size, and scales and offsets of 16 bits, a weight takes 5 bits."""
_INT4_KERNEL_GROUPS: Final = (32, 64, 128)
_INT4_RANGES: Final = (1.0, 0.85)
"""Integers of 4 bits stand for 16 evenly spaced numbers, a grid. `quantize` fits a grid over each
of these shares of a group's range, and takes the grid with the least error. A grid over the whole
range represents weights exactly if they are on a grid already. A grid over a smaller range is
finer, which suits all weights except outliers. In the shipped model, the error with these two
shares is 0.6 % smaller than with the whole range alone; with four shares it would be 1.3 % smaller.
"""
_INT4_FITS: Final = 2
_FLOAT32_EPS: Final = 1e-6
_PIECE: Final = 2**18
"""Number of weights that are fitted at a time, so that they stay within a cache."""


class Quantization(Enum):
    """How weights of linear maps are stored."""

    INT8 = "int8"
    """Each output feature has one scale and no offset."""
    INT4 = "int4"
    """Each output feature has a scale and an offset for every 32 input features."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight `[N, K]` as integers: `values * scale + offset`."""

    quantization: Quantization
    values: torch.Tensor
    """int8[N, K] in [-127, 127], or in [-8, 7] for 4 bits."""
    scales: torch.Tensor
    """float32 `[N, G]`, each for K / G values of an output feature."""
    offsets: torch.Tensor | None
    """Shaped like the scales; None: zeros.

    The kernel multiplies with scales and offsets in float16. At 4 bits, the kernel stores
    `values + 8`, which are from 0 to 15. So the offset that the kernel stores is
    `offset - 8 * scale`. With weights of GGUF's types Q4_0 and Q4_1, this offset is not changed by
    rounding to float16.
    """

    def to(self, device: torch.device) -> "QuantizedWeight":
        """Return the same weight on `device`."""
        offsets = None if self.offsets is None else self.offsets.to(device)
        return replace(
            self, values=self.values.to(device), scales=self.scales.to(device), offsets=offsets
        )

    def dequantized(self) -> torch.Tensor:
        """Return the weight as floating-point numbers: float32 `[N, K]`."""
        by_group = self.values.float().view(*self.scales.shape, -1)
        weight = by_group * self.scales.unsqueeze(2)
        if self.offsets is not None:
            weight += self.offsets.unsqueeze(2)
        return weight.view(self.values.shape)

    def fits_half_precision(self) -> bool:
        """Whether scales and offsets in float16 are precise enough for products in float32.

        They are if rounding to float16 changes each scale and each offset by at most `_FLOAT32_EPS`
        times the scale. At 4 bits, the tested offsets are those that the kernel stores (`offsets`).
        """
        numbers = [self.scales]
        if self.offsets is not None:
            is_int4 = self.quantization is Quantization.INT4
            numbers.append(self.offsets - 8 * self.scales if is_int4 else self.offsets)
        return all(
            bool(((_rounded(number) - number).abs() <= _FLOAT32_EPS * self.scales.abs()).all())
            for number in numbers
        )

    def without_zero_offsets(self) -> "QuantizedWeight":
        """Replace offsets by None if all are zero; weights of 4 bits always keep their offsets."""
        if self.quantization is Quantization.INT4 or self.offsets is None or self.offsets.any():
            return self
        return replace(self, offsets=None)


def can_quantize(num_in: int, quantization: Quantization) -> bool:
    """Whether a weight with `num_in` input features can be quantized to `quantization`."""
    return quantization is Quantization.INT8 or num_in % _INT4_GROUP_SIZE == 0


def quantize(weight: torch.Tensor, quantization: Quantization) -> QuantizedWeight:
    """Round a weight `[N, K]` to integers; requires `can_quantize`."""
    if quantization is Quantization.INT8:
        largest = weight.abs().amax(1, keepdim=True).float()
        scales = _no_zeros(_rounded(largest / 127))
        values = (weight.float() / scales).round_().clamp_(-127, 127)
        return QuantizedWeight(quantization, values.to(torch.int8), scales, None)
    pieces = torch.split(weight, max(1, _PIECE // weight.shape[1]))
    values, scales, offsets = map(torch.cat, zip(*map(_quantize_int4, pieces), strict=True))
    return QuantizedWeight(quantization, values, scales, offsets)


def _quantize_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize rows of a weight to 4 bits; return values, scales and offsets."""
    groups = weight.float().view(weight.shape[0], -1, _INT4_GROUP_SIZE)  # [N, G, 32]
    scales, lows, errors = _fit_int4(groups, _INT4_RANGES[0])
    for share in _INT4_RANGES[1:]:
        other_scales, other_lows, other_errors = _fit_int4(groups, share)
        is_better = other_errors < errors
        scales = torch.where(is_better, other_scales, scales)
        lows = torch.where(is_better, other_lows, lows)
        errors = torch.minimum(errors, other_errors)
    values = _round_int4(groups, scales, lows).sub_(8).to(torch.int8).flatten(1)
    return values, scales.squeeze(2), (lows + 8 * scales).squeeze(2)


def _fit_int4(
    groups: torch.Tensor, range_share: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fit a grid, 16 evenly spaced numbers, to each group of 32 weights; `groups` is `[N, G, 32]`.

    The fit starts with a grid over `range_share` of the group's range, and improves the grid by
    least squares.

    Returns:
        For each grid, the scale (the distance between neighbouring numbers), the lowest number, and
        the sum of the group's squared errors; each float32 `[N, G, 1]`. Scale and lowest number are
        rounded to float16, because the kernel stores them in float16.
    """
    low, high = (range_share * bound for bound in groups.aminmax(dim=2, keepdim=True))
    scales = _no_zeros((high - low) / 15)
    mean = groups.mean(2, keepdim=True)
    for _ in range(_INT4_FITS):
        values = _round_int4(groups, scales, low)
        centre = values.mean(2, keepdim=True)
        values -= centre
        covariance = (values * groups).sum(2, keepdim=True)
        scales = _no_zeros(_rounded(covariance / values.square_().sum(2, keepdim=True)))
        low = _rounded(mean - scales * centre)
    lost = _round_int4(groups, scales, low).mul_(scales).add_(low).sub_(groups)
    return scales, low, lost.square_().sum(2, keepdim=True)


def _round_int4(groups: torch.Tensor, scales: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    return ((groups - low) / scales).round_().clamp_(0, 15)


def _rounded(numbers: torch.Tensor) -> torch.Tensor:
    """Round to float16, in which our kernels store scales and offsets; return float32."""
    return numbers.half().float()


def can_multiply(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Whether our own kernel takes the weight, on its device, for activations of `dtype`.

    On a CPU, 4-bit groups must have 32, 64 or 128 input features. The kernel rounds scales and
    offsets to float16. For float32 activations, the kernel takes a weight only if this rounding
    hardly changes the weight (`fits_half_precision`), because products in float32 are expected to
    be precise. On a GPU, no kernel takes float32 activations.
    """
    if gpu_linear.is_here(weight.values.device):
        return gpu_linear.can_pack(
            weight.values.shape[1],
            weight.scales.shape[1],
            dtype,
            is_int4=weight.quantization is Quantization.INT4,
        )
    group_size = weight.values.shape[1] // weight.scales.shape[1]
    if weight.quantization is Quantization.INT4 and group_size not in _INT4_KERNEL_GROUPS:
        return False
    if dtype is torch.float32 and not weight.fits_half_precision():
        return False
    return native.can_pack_integers(weight.values, dtype)


def make_quantized_linear(
    weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> Linear:
    """Make the map `x @ weight.T + bias`.

    If our own kernel can multiply the quantized weight (`can_multiply`), the map stores integers.
    Otherwise the map stores the dequantized weight, which takes more memory.

    Args:
        weight: `[N, K]`, quantized.
        bias: `[N]` of `dtype`.
        dtype: The dtype of the activations.
    """
    if not can_multiply(weight, dtype):
        return make_linear(weight.dequantized().to(dtype), bias)
    bits = 8 if weight.quantization is Quantization.INT8 else 4
    pack: Callable[..., Linear] = native.pack_integers
    if gpu_linear.is_here(weight.values.device):
        pack = gpu_linear.pack_integers
    return pack(bits, weight.values, weight.scales, weight.offsets, bias, dtype)


def _no_zeros(scales: torch.Tensor) -> torch.Tensor:
    """Replace scales of 0 or NaN, which occur where all weights are equal, by 1."""
    return torch.where(scales > 0, scales, 1.0)
