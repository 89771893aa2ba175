"""Linear maps, with weights in the layout that the device multiplies fastest.

Symbols: `T` tokens, `H` heads, `K` input features, `N` output features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.nn import functional

from kernels.cpu import linear as native

Linear: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Maps `[T, K]` to `[T, N]` of the same dtype and device, each token by itself."""

HeadMaps: TypeAlias = Callable[[torch.Tensor, torch.Tensor], None]
"""A linear map for each head: maps the first argument, `[T, H, K]`, and writes the result to the
second argument, `[T, H, N]`."""


def make_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, *, is_low_rank: bool = False
) -> Linear:
    """Make the map `x @ weight.T + bias` in the device's fastest form.

    On a CPU this function packs the weight for our own kernel. A product with few tokens then takes
    only the time to read the weight, and a token's result does not depend on the number of tokens.
    If the weight cannot be packed, the map calls torch to multiply. Without compiled C code, no
    weight can be packed.

    Args:
        weight: `[N, K]`; the caller need not keep it.
        bias: `[N]`, of the weight's dtype.
        is_low_rank: Whether the weight is A or B of a LoRA adapter.
    """
    if native.can_pack(weight):
        return native.pack(weight, bias, is_low_rank=is_low_rank)
    return PlainLinear(weight, bias)


@dataclass(frozen=True, slots=True, eq=False)
class PlainLinear:
    """A map that torch multiplies."""

    weight: torch.Tensor
    """`[N, K]`."""
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[T, K]` to `[T, N]`."""
        return functional.linear(x, self.weight, self.bias)


def make_head_maps(weight: torch.Tensor) -> HeadMaps:
    """Make the maps `x[:, h] @ weight[h].T` in the device's fastest form; see `make_linear`.

    Args:
        weight: `[H, N, K]`; the caller need not keep it.
    """
    if native.can_pack(weight[0]):
        return native.pack_heads(weight)
    by_head = weight.transpose(1, 2).contiguous()  # [H, K, N]

    def multiply(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.bmm(x.transpose(0, 1), by_head).transpose(0, 1))

    return multiply
