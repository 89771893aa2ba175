"""RMS normalisation, alone and fused with the residual sum before it.

Symbols: `T` tokens, `H` heads, `N` the width that is normalised.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202  Triton infers the types inside kernels

import torch
import triton
import triton.language as tl

from kernels.checks import check_float, check_norm_weight, check_tensor


@triton.jit
def _normalise(x, weight, column, eps, N: tl.constexpr):
    """Normalise one row, `x`, and return its product with the weight, as fp32.

    `x` is zero past N. The normalised row is rounded to the weight's dtype before the product. The
    returned product is not rounded.
    """
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / N + eps)
    w = tl.load(weight + column, mask=column < N, other=0.0)
    return w.to(tl.float32) * (wide * scale).to(w.dtype).to(tl.float32)


@triton.jit
def _rms_norm_kernel(
    x,  # [T, H, N]
    weight,  # [N]
    out,  # [T, H, N], contiguous
    x_stride_t,
    x_stride_h,
    eps,
    H: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,  # power of two, at least N
):
    """`out[t, h] = weight * x[t, h] / sqrt(mean(x[t, h]^2) + eps)`; one program per (t, h)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < N
    x_row = x + (row // H) * x_stride_t + (row % H) * x_stride_h
    normed = _normalise(tl.load(x_row + column, mask=inside, other=0.0), weight, column, eps, N)
    tl.store(out + row * N + column, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm_kernel(
    x,  # [T, N]
    residual,  # [T, N]
    weight,  # [N]
    out,  # [T, N], contiguous
    total,  # [T, N], contiguous
    x_stride_t,
    residual_stride_t,
    eps,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,  # power of two, at least N
):
    """`total = x + residual`, rounded; `out = rms_norm(total)`; one program per token."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < N
    left = tl.load(x + row * x_stride_t + column, mask=inside, other=0.0)
    right = tl.load(residual + row * residual_stride_t + column, mask=inside, other=0.0)
    added = (left.to(tl.float32) + right.to(tl.float32)).to(left.dtype)
    tl.store(total + row * N + column, added, mask=inside)
    normed = _normalise(added, weight, column, eps, N)
    tl.store(out + row * N + column, normed.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `weight * x / sqrt(mean(x^2) + eps)` over the last dimension, in the shape of `x`.

    `x` is [T, N], or [T, H, N] to normalise each head; strides over T and H may be any. `weight` is
    [N], of the dtype of `x` or fp32. The mean and the quotient are fp32; the quotient is rounded to
    `weight.dtype` before the product with `weight`, as in transformers' Llama and Gemma.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    rows = x.unsqueeze(1) if x.dim() == 2 else x  # noqa: PLR2004  [T, H, N]
    check_float("x", rows, 3)
    num_tokens, num_heads, width = rows.shape
    check_norm_weight(weight, width, x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rms_norm_kernel[(num_tokens * num_heads,)](
        rows,
        weight,
        out,
        *rows.stride()[:2],
        eps,
        H=num_heads,
        N=width,
        COLUMNS=triton.next_power_of_2(width),
    )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(rms_norm(x + residual), x + residual)`; the sum is rounded to `x.dtype` first.

    Both inputs are [T, N] and are not changed; their strides over T may be any. `weight` is as in
    `rms_norm`.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    check_float("x", x, 2)
    num_tokens, width = x.shape
    check_tensor("residual", residual, (num_tokens, width), x.dtype, x)
    check_norm_weight(weight, width, x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    _add_rms_norm_kernel[(num_tokens,)](
        x,
        residual,
        weight,
        out,
        total,
        x.stride(0),
        residual.stride(0),
        eps,
        N=width,
        COLUMNS=triton.next_power_of_2(width),
    )
    return out, total
