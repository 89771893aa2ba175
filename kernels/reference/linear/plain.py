"""A linear map with 16- or 32-bit weights, in plain torch.

Symbols: `T` tokens, `K` input features, `N` output features.
"""

import torch
from torch.nn import functional


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `x @ weight.T + bias` [T, N] for `x` [T, K] and `weight` [N, K]; sums are fp32."""
    return functional.linear(x, weight, bias)
