"""Converts numbers in registers to and from the formats of a quantized cache (`kv_formats`).

fp8 (e4m3) is converted with integer operations, in tensors of uint8, because only devices from
sm_89 on can convert it in hardware. All devices use these operations, so the converted numbers are
the same on all of them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202  Triton infers the types inside kernels

import torch
import triton
import triton.language as tl


@triton.jit
def largest_of(x, axis: tl.constexpr):
    """Return max |x| over an axis of fp32 `x`; infinity if a number is NaN."""
    # A NaN is replaced because the maximum would ignore it.
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis=axis)  # noqa: PLR0124


@triton.jit
def scale_of(largest, LARGEST: tl.constexpr):
    """Return each row's scale, `largest / LARGEST` rounded up to a bfloat16 number, as fp32."""
    bits = tl.div_rn(largest, LARGEST + tl.zeros_like(largest)).to(tl.int32, bitcast=True)
    return ((bits + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def quantize(x, scale, IS_FP8: tl.constexpr):
    """Return fp32 `x / scale`, rounded to nearest (ties to even), as int8 or the bits of e4m3."""
    divisor = tl.where(scale == 0, 1.0, scale)  # 0 is the scale of a row of zeros
    quotient = tl.div_rn(x, divisor + tl.zeros_like(x))
    return _to_e4m3(quotient) if IS_FP8 else _rounded(quotient).to(tl.int8)


@triton.jit
def plain_numbers(numbers, dtype: tl.constexpr):
    """Return `numbers / unit_of(numbers)`, exactly, as `dtype`.

    `numbers` are int8, the bits of e4m3, or already of `dtype`. The caller must multiply the result
    by `unit_of(numbers)`.
    """
    if numbers.dtype == tl.uint8:
        # Read as fp16, the number is 2^8 times smaller, because fp16's exponent has a bias of 15,
        # not 7.
        bits = numbers.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        plain = bits.to(tl.float16, bitcast=True).to(dtype)
    else:
        plain = numbers.to(dtype)
    return plain


@triton.jit
def unit_of(numbers):
    """Return the factor by which the result of `plain_numbers` must be multiplied.

    The scale is not in this factor.
    """
    return 256.0 if numbers.dtype == tl.uint8 else 1.0


@triton.jit
def _rounded(x):
    """Round x, |x| < 2^22, to an integer: x + 1.5 * 2^23 has no bits for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _to_e4m3(x):
    """Return the bits of x, |x| <= 448, converted to e4m3, as uint8."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.abs(x)
    # The mantissa is rounded from 23 to 3 bits; the exponent's bias changes from 127 to 7.
    rest = bits & 0x7FFFFFFF
    normal = ((rest + 0x7FFFF + ((rest >> 20) & 1)) >> 20) - (120 << 3)
    # Numbers below 2^-6 are multiples of 2^-9, the last bit of a float near 2^14.
    tiny = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    magnitude = tl.where(size < 0.015625, tiny, normal)  # noqa: PLR2004
    return (magnitude | ((bits >> 24) & 0x80)).to(tl.uint8)


def as_bits(cache: torch.Tensor) -> torch.Tensor:
    """Return `cache` in the dtype that kernels take: fp8 viewed as uint8, others as they are."""
    return cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache
