"""Gated activations of an MLP, such as SwiGLU; gate and up are the two halves of `gate_up`.

Symbols: `T` tokens, `I` intermediate size.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202  Triton infers the types inside kernels

from typing import Final

import torch
import triton
import triton.language as tl

from kernels.checks import check_float

_COLUMNS: Final = 1024  # elements of one program


@triton.jit
def _silu_mul_kernel(
    gate_up,  # [T, 2 * I]
    out,  # [T, I], contiguous
    gate_up_stride_t,
    I: tl.constexpr,  # noqa: E741
    COLUMNS: tl.constexpr,  # elements of a program
):
    """`out[t, i] = silu(gate_up[t, i]) * gate_up[t, I + i]`, silu(x) = x / (1 + exp(-x)).

    Each program computes COLUMNS elements of one token. SiLU is computed in fp32 and rounded to the
    dtype of `gate_up` before the product.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < I
    row = gate_up + token * gate_up_stride_t
    gate = tl.load(row + column, mask=inside, other=0.0)
    up = tl.load(row + I + column, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + token * I + column, (silu * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` [T, I] for `gate_up` [T, 2 * I], with gate in the first half.

    Raises:
        ValueError: `gate_up` is not 2-dimensional, is not a float, has an odd width, or its rows
            are not dense.
    """
    out = _gated(gate_up)
    num_tokens, size = out.shape
    _silu_mul_kernel[(num_tokens, triton.cdiv(size, _COLUMNS))](
        gate_up, out, gate_up.stride(0), I=size, COLUMNS=_COLUMNS
    )
    return out


@triton.jit
def _tanh_gelu_mul_kernel(
    gate_up,  # [T, 2 * I]
    out,  # [T, I], contiguous
    gate_up_stride_t,
    I: tl.constexpr,  # noqa: E741
    COLUMNS: tl.constexpr,  # elements of a program
):
    """`out[t, i] = gelu(gate_up[t, i]) * gate_up[t, I + i]`, with GELU's tanh approximation.

    (1 + tanh(z)) / 2 is computed as 1 / (1 + exp(-2 z)). Each program computes COLUMNS elements of
    one token. GELU is computed in fp32 and rounded to the dtype of `gate_up` before the product.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < I
    row = gate_up + token * gate_up_stride_t
    gate = tl.load(row + column, mask=inside, other=0.0)
    up = tl.load(row + I + column, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    doubled = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)  # 2 * sqrt(2 / pi)
    gelu = (wide / (1.0 + tl.exp(-doubled))).to(gate.dtype).to(tl.float32)
    tl.store(out + token * I + column, (gelu * up).to(out.dtype.element_ty), mask=inside)


def tanh_gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute `kernels.reference.tanh_gelu_mul`.

    Raises:
        ValueError: as `silu_mul`.
    """
    out = _gated(gate_up)
    num_tokens, size = out.shape
    _tanh_gelu_mul_kernel[(num_tokens, triton.cdiv(size, _COLUMNS))](
        gate_up, out, gate_up.stride(0), I=size, COLUMNS=_COLUMNS
    )
    return out


@triton.jit
def _clamped_swiglu_kernel(
    gate_up,  # [T, 2 * I]
    out,  # [T, I], contiguous
    gate_up_stride_t,
    I: tl.constexpr,  # noqa: E741
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    COLUMNS: tl.constexpr,  # elements of a program
):
    """`out[t, i] = (up + 1) * gate * sigmoid(ALPHA * gate)`.

    gate is `gate_up[t, i]`, clamped to at most LIMIT. up is `gate_up[t, I + i]`, clamped to
    [-LIMIT, LIMIT]. Each program computes COLUMNS elements of one token. The result is computed in
    fp32 and rounded once.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < I
    row = gate_up + token * gate_up_stride_t
    gate = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + I + column, mask=inside, other=0.0).to(tl.float32)
    # Comparisons are used because they keep NaN.
    gate = tl.where(gate > LIMIT, LIMIT, gate)
    up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    glu = gate / (1.0 + tl.exp(-ALPHA * gate))
    tl.store(out + token * I + column, ((up + 1.0) * glu).to(out.dtype.element_ty), mask=inside)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Compute `kernels.reference.clamped_swiglu`.

    Raises:
        ValueError: `gate_up` is not 2-dimensional, is not a float, has an odd width, or its rows
            are not dense.
    """
    out = _gated(gate_up)
    num_tokens, size = out.shape
    _clamped_swiglu_kernel[(num_tokens, triton.cdiv(size, _COLUMNS))](
        gate_up,
        out,
        gate_up.stride(0),
        I=size,
        ALPHA=alpha,
        LIMIT=limit,
        COLUMNS=_COLUMNS,
    )
    return out


def _gated(gate_up: torch.Tensor) -> torch.Tensor:
    """Check `gate_up` [T, 2 * I]; return an uninitialized tensor [T, I] for the gated product."""
    check_float("gate_up", gate_up, 2)
    num_tokens, width = gate_up.shape
    if width % 2 != 0:
        raise ValueError(f"gate_up has width {width}; it must be a multiple of 2")
    return torch.empty((num_tokens, width // 2), dtype=gate_up.dtype, device=gate_up.device)
