"""RMS normalisation in plain torch, bit-equal to that of Llama and Gemma in transformers.

Symbols: `T` tokens, `N` the width that is normalised.
"""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `weight * x / sqrt(mean(x^2) + eps)` over the last dimension, in the shape of `x`.

    `x` is [..., N]. `weight` is [N], of the dtype of `x` or fp32. To normalise each head, give `x`
    as [T, heads, head dim]. The mean and the quotient, x / sqrt(...), are fp32. The quotient is
    rounded to `weight.dtype` and multiplied by `weight`. The product is rounded to `x.dtype`.
    """
    wide = x.float()
    variance = wide.pow(2).mean(-1, keepdim=True)
    return (weight * (wide * torch.rsqrt(variance + eps)).to(weight.dtype)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(rms_norm(x + residual), x + residual)`; the sum is rounded to `x.dtype` first.

    Both inputs are [..., N] and are not changed.
    """
    total = x + residual
    return rms_norm(total, weight, eps), total
