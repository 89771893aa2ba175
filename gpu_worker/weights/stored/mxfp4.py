"""Weights in MXFP4: numbers of 4 bits; 32 numbers share one scale, which is a power of two.

The format: OCP Microscaling Formats (MX), version 1.0.

Symbols: `N` output features of a linear map, `K` its input features, `G` groups of 32.
"""

from dataclasses import dataclass
from typing import Final

import torch

from gpu_worker.weights import gpu_linear
from gpu_worker.weights.linear import Linear
from gpu_worker.weights.stored.format import MXFP4_GROUP_SIZE
from kernels.cpu import linear as native
from kernels.reference.linear.quantized import E2M1, powers_of_two

NAN_SCALE: Final = 255
"""The code of a scale that stands for NaN, not for a power of two."""
LARGEST_SCALE: Final = 240
"""The code of 2^113, the largest supported scale. GPU kernels multiply scales by 2^14 in float32,
which overflows for larger scales."""


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Weight:
    """A weight `[N, K]`, in the form in which gpt-oss is published."""

    blocks: torch.Tensor
    """uint8[N, G, 16]: each byte has two numbers of `E2M1`, the first in its low bits."""
    scales: torch.Tensor
    """uint8[N, G], which `powers_of_two` decodes."""

    def dequantized(self) -> torch.Tensor:
        """Return the weight, exactly: float32 `[N, K]`."""
        numbers = torch.stack((self.blocks & 15, self.blocks >> 4), 3).flatten(2)  # [N, G, 32]
        by_group = torch.tensor(E2M1, device=numbers.device)[numbers.int()]
        return (by_group * powers_of_two(self.scales).unsqueeze(2)).flatten(1)


def can_pack_mxfp4(weight: Mxfp4Weight, dtype: torch.dtype) -> bool:
    """Whether the weight's device has a kernel for this weight and activations of `dtype`."""
    device, num_groups = weight.scales.device, weight.scales.shape[1]
    if gpu_linear.is_here(device):
        return gpu_linear.can_pack(num_groups * MXFP4_GROUP_SIZE, num_groups, dtype, is_int4=True)
    return native.can_pack_mxfp4(device, dtype)


def pack_mxfp4(weight: Mxfp4Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> Linear:
    """Make the map `x @ weight.T + bias`; `can_pack_mxfp4` must hold.

    Args:
        weight: The caller need not keep it, because the map has a packed copy.
        bias: `[N]` of `dtype`.
        dtype: The dtype of the activations.
    """
    if gpu_linear.is_here(weight.scales.device):
        return gpu_linear.pack_mxfp4(weight.blocks, weight.scales, bias, dtype)
    return native.pack_mxfp4(weight.blocks, weight.scales, bias, dtype)
