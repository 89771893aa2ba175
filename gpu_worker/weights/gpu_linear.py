"""Linear maps with weights of 8 or 4 bits on a GPU.

Symbols: `T` tokens, `K` input features, `N` output features, `G` groups of input features.
"""

import functools
from dataclasses import dataclass, replace
from typing import Final

import structlog
import torch

from gpu_worker.weights.linear import Linear, PlainLinear
from kernels import ops
from kernels.reference.linear.quantized import HALF_RUN, pack_nibbles
from kernels.triton.linear.tile_sizes import fewest_rows

_RUN: Final = 32
"""The number of input features in a group must be a multiple of this. There is one exception: a
weight of 8 bits with a single group may have any number of input features."""
_FP8_LARGEST: Final = torch.finfo(torch.float8_e4m3fn).max
_FP8_MULTIPLE: Final = 16
"""`torch._scaled_mm` needs K and N that are multiples of this number."""
_FP8_CAPABILITY: Final = (9, 0)
"""The least compute capability for fp8 products with a scale for each token and each output
feature."""

_log = structlog.get_logger()


def is_here(device: torch.device) -> bool:
    """Whether maps on `device` are multiplied by the code of this module."""
    return device.type == "cuda"


def can_pack(num_in: int, num_groups: int, dtype: torch.dtype, *, is_int4: bool = False) -> bool:
    """Whether the GPU's kernel takes a weight `[N, K]` with G groups for activations of `dtype`."""
    # For float32 activations, weights are dequantized, so that products are exact.
    is_whole = num_groups == 1 and not is_int4
    return dtype is not torch.float32 and (is_whole or num_in // num_groups % _RUN == 0)


def pack_integers(
    bits: int,
    values: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> "QuantizedLinear":
    """Make the map of an integer weight; arguments as for `kernels.cpu.linear.pack_integers`.

    `can_pack` must hold. Scales and offsets are rounded to float16. At 4 bits, the map stores
    `value + 8`, so that no value is negative; its offsets are `offset - 8 * scale` to match.
    """
    values = values.t()
    if bits == 4:  # noqa: PLR2004
        assert offsets is not None, "integers of 4 bits begin at 0"
        values = pack_nibbles((values + 8).to(torch.uint8).contiguous())
        offsets = offsets - 8 * scales
    return _packed(
        values,
        scales.t().to(torch.float16),
        None if offsets is None else offsets.t().to(torch.float16),
        bias,
        dtype,
    )


def pack_fp8(
    values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> Linear:
    """Make the map of an fp8 weight: `values`, e4m3 [N, K], times `scales`, fp32 [N, G].

    `can_pack` must hold.
    """
    why_not = _why_not_scaled(values, scales, dtype)
    if why_not is None:
        return ScaledLinear(values.contiguous(), scales.t().contiguous(), bias)
    _tell_once(why_not)
    return _packed(values.t(), scales.t(), None, bias, dtype)


def pack_mxfp4(
    blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> "QuantizedLinear":
    """Make the map of an MXFP4 weight; arguments as for `kernels.cpu.linear.pack_mxfp4`.

    `can_pack` must hold.
    """
    # A byte of `blocks` has two neighbours of a group's 32 features. The kernel takes bytes of two
    # features that are 16 apart.
    low, high = blocks[:, :, : HALF_RUN // 2], blocks[:, :, HALF_RUN // 2 :]
    values = torch.stack((low & 15 | high << 4, low >> 4 | high & 0xF0), 3)  # [N, G, 8, 2]
    return _packed(values.flatten(1).t(), scales.t(), None, bias, dtype)


def batch_invariant(linear: Linear, dtype: torch.dtype) -> Linear:
    """Make from `linear` a map whose result for a token never depends on the other tokens.

    Libraries choose kernels by the number of tokens. So a `PlainLinear` gets a kernel of ours, and
    fp8 weights are multiplied as 16-bit numbers. `dtype` is that of the activations.
    """
    if isinstance(linear, PlainLinear):
        return OneTileLinear(linear.weight, linear.bias)
    if isinstance(linear, ScaledLinear):
        linear = _packed(linear.weight.t(), linear.scales, None, linear.bias, dtype)
    if isinstance(linear, QuantizedLinear):
        return replace(linear, has_one_tile=True)
    return linear  # a CPU's map


def _packed(
    values: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> "QuantizedLinear":
    offsets = None if offsets is None else offsets.contiguous()
    linear = QuantizedLinear(values.contiguous(), scales.contiguous(), offsets, bias)
    linear.compile(dtype)
    return linear


def _why_not_scaled(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Return why `ScaledLinear` does not take a weight; None: it does."""
    capability = _capability(values.device)
    if capability < _FP8_CAPABILITY:
        return f"the device has compute capability {capability}; it must be {_FP8_CAPABILITY}"
    if scales.shape[1] != 1:
        return f"an output has {scales.shape[1]} scales; it must have 1"
    if dtype is not torch.bfloat16:
        return f"the dtype is {dtype}; it must be {torch.bfloat16}"
    if any(size % _FP8_MULTIPLE for size in values.shape):
        shape = tuple(values.shape)
        return f"a weight has shape {shape}; its sizes must be multiples of {_FP8_MULTIPLE}"
    return None


@functools.cache
def _tell_once(reason: str) -> None:
    _log.info("fp8 weights are multiplied as 16-bit numbers", reason=reason)


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedLinear:
    """A map whose weight is dequantized within the product; see `ops.quantized_linear`."""

    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    bias: torch.Tensor | None
    has_one_tile: bool = False
    """Whether no bit of a token's result depends on the number of tokens."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[T, K]` to `[T, N]`."""
        return ops.quantized_linear(
            x, self.values, self.scales, self.offsets, self.bias, has_one_tile=self.has_one_tile
        )

    def compile(self, dtype: torch.dtype) -> None:
        """Launch each variant of the kernel once, so that none is compiled while serving."""
        if not is_here(self.values.device):
            return
        num_in = self.values.shape[0] * (2 if self.values.dtype is torch.uint8 else 1)
        for num_rows in fewest_rows():
            self(torch.zeros(num_rows, num_in, dtype=dtype, device=self.values.device))


@dataclass(frozen=True, slots=True, eq=False)
class OneTileLinear:
    """A map whose result for a token never depends on the number of tokens; see `ops.linear`."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[T, K]` to `[T, N]`."""
        return ops.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class ScaledLinear:
    """A map with an fp8 weight; it rounds activations to fp8, too, with a scale for each token."""

    weight: torch.Tensor
    """e4m3 [N, K], contiguous; the product takes its transpose."""
    scales: torch.Tensor
    """fp32 [1, N]"""
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[T, K]` to `[T, N]`."""
        if not len(x):
            return x.new_empty(0, len(self.weight))
        largest = x.abs().amax(1, keepdim=True).float()  # [T, 1]
        # For a row of zeros any scale is right; a row with non-finite numbers keeps them.
        x_scales = (largest / _FP8_LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
        numbers = (x / x_scales).clamp_(-_FP8_LARGEST, _FP8_LARGEST).to(torch.float8_e4m3fn)
        return torch._scaled_mm(  # noqa: SLF001  there is no public name
            numbers.contiguous(),
            self.weight.t(),
            scale_a=x_scales,
            scale_b=self.scales,
            bias=self.bias,
            out_dtype=x.dtype,
        )
