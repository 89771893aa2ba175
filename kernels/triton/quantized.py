"""Numbers of a quantized cache in registers: what `kernels.kv_formats` defines, for Triton.

fp8 (e4m3) goes by its bits, in tensors of uint8: that needs no conversion by the hardware, which
only devices from sm_89 on have, and gives the same numbers everywhere.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202  Triton infers the types inside kernels

import torch
import triton
import triton.language as tl


@triton.jit
def largest_of(x, axis: tl.constexpr):
    """Return max |x| over an axis of fp32 `x`; infinity if one is NaN."""
    # A NaN would not take part in the maximum.
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis=axis)  # noqa: PLR0124


@triton.jit
def scale_of(largest, LARGEST: tl.constexpr):
    """Return fp32 `largest / LARGEST` of rows, rounded up to bfloat16, which it fits exactly."""
    bits = tl.div_rn(largest, LARGEST + tl.zeros_like(largest)).to(tl.int32, bitcast=True)
    return ((bits + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def quantize(x, scale, IS_FP8: tl.constexpr):
    """Return fp32 `x / scale` as int8, or as the bits of e4m3, to nearest, ties to even."""
    divisor = tl.where(scale == 0, 1.0, scale)  # of a row of zeros
    quotient = tl.div_rn(x, divisor + tl.zeros_like(x))
    return _to_e4m3(quotient) if IS_FP8 else _rounded(quotient).to(tl.int8)


@triton.jit
def plain_numbers(numbers, dtype: tl.constexpr):
    """Return stored `numbers` as `dtype`, exactly: int8, the bits of e4m3, or `dtype` itself.

    Those of e4m3 come out `unit_of` times less.
    """
    if numbers.dtype == tl.uint8:
        # As fp16, with exponents of five bits whose bias is 15, not 7: 2^8 times less.
        bits = numbers.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        plain = bits.to(tl.float16, bitcast=True).to(dtype)
    else:
        plain = numbers.to(dtype)
    return plain


@triton.jit
def unit_of(numbers):
    """Return what `plain_numbers` are to be multiplied by, before any scale."""
    return 256.0 if numbers.dtype == tl.uint8 else 1.0


@triton.jit
def _rounded(x):
    """Return |x| < 2^22 rounded to an integer: adding 1.5 * 2^23 leaves no bits below."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _to_e4m3(x):
    """Return the bits of |x| <= 448 as e4m3, uint8."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.abs(x)
    # 3 of 23 bits of the mantissa stay, rounded; then the exponent's bias is 7, not 127.
    rest = bits & 0x7FFFFFFF
    normal = ((rest + 0x7FFFF + ((rest >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6, multiples of 2^-9: of which a number of 2^14 has its last bit.
    tiny = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    magnitude = tl.where(size < 0.015625, tiny, normal)  # noqa: PLR2004
    return (magnitude | ((bits >> 24) & 0x80)).to(tl.uint8)


def as_bits(cache: torch.Tensor) -> torch.Tensor:
    """Return `cache` as kernels take it: fp8 as uint8, of the same shape and strides."""
    return cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache
