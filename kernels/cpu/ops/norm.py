"""RMS normalisation in C, alone and fused with the residual sum before it.

Symbols: `T` tokens, `H` heads, `N` the width that is normalised.
"""

import torch

from kernels import reference
from kernels.checks import check_tensor
from kernels.cpu.library import DTYPES, native


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `weight * x / sqrt(mean(x^2) + eps)` over the last dimension; the shape of `x`.

    `x` is [T, N] or [T, H, N] of any strides over T and H, `weight` [N]. The mean and the quotient
    are fp32; the quotient is rounded to `x.dtype` before the product with `weight`.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    library, dtype = native(), DTYPES.get(x.dtype)
    if library is None or dtype is None or x.dim() not in (2, 3):
        return reference.rms_norm(x, weight, eps)
    rows = x if x.dim() == 3 else x.unsqueeze(1)  # noqa: PLR2004  [T, H, N]
    num_tokens, num_heads, width = rows.shape
    check_tensor("x", rows, (num_tokens, num_heads, width), x.dtype, weight)
    check_tensor("weight", weight, (width,), x.dtype, x)
    out = x.new_empty(x.shape)
    library.rms_norm(
        dtype, num_tokens, num_heads, width,
        rows.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), 0,
        rows.stride(0), rows.stride(1), 0, eps,
    )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(rms_norm(x + residual), x + residual)`; the sum is rounded to `x.dtype` first.

    Both inputs are [T, N], of any stride over T, and stay as they are.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    library, dtype = native(), DTYPES.get(x.dtype)
    if library is None or dtype is None or x.dim() != 2:  # noqa: PLR2004  [T, N]
        return reference.add_rms_norm(x, residual, weight, eps)
    num_tokens, width = x.shape
    check_tensor("x", x, (num_tokens, width), x.dtype, weight)
    check_tensor("residual", residual, (num_tokens, width), x.dtype, x)
    check_tensor("weight", weight, (width,), x.dtype, x)
    out, total = x.new_empty(x.shape), x.new_empty(x.shape)
    library.rms_norm(
        dtype, num_tokens, 1, width,
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), total.data_ptr(),
        x.stride(0), 0, residual.stride(0), eps,
    )  # fmt: skip
    return out, total
