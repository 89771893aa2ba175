"""Linear maps in float8_e4m3fn, with scales.

Symbols: `N` output features of a linear map, `K` its input features, `G` groups of input features.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gpu_worker.weights.stored.format import Fp8Format, ScaleShape
from gpu_worker.weights.tensor_file import TensorSpec


def fp8_tensors(stored: Fp8Format, num_out: int, num_in: int) -> dict[str, TensorSpec]:
    """Return the shape and dtype of each tensor of a map; a key is the end of a tensor's name."""
    if stored.scale_shape is ScaleShape.TENSOR:
        shape: tuple[int, ...] = (1,)
    elif stored.scale_shape is ScaleShape.CHANNEL:
        shape = (num_out, 1)
    else:
        blocks = zip((num_out, num_in), stored.scale_shape, strict=True)
        shape = tuple(-(-size // block) for size, block in blocks)
    return {
        "weight": ((num_out, num_in), torch.float8_e4m3fn),
        stored.scale_name: (shape, torch.float32),
    }


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """A weight `[N, K]` as fp8 numbers: `values * scale`."""

    values: torch.Tensor
    """float8_e4m3fn[N, K]"""
    scales: torch.Tensor
    """float32 `[N, G]`, each for K / G values of an output feature."""

    def to(self, device: torch.device) -> "Fp8Weight":
        """Return the same weight on `device`."""
        return Fp8Weight(self.values.to(device), self.scales.to(device))

    def dequantized(self) -> torch.Tensor:
        """Return the weight, float32 `[N, K]`."""
        by_group = self.values.float().view(*self.scales.shape, -1)
        return (by_group * self.scales.unsqueeze(2)).view(self.values.shape)


def unpack_fp8(
    stored: Fp8Format, tensors: Mapping[str, torch.Tensor], rows: slice, columns: slice
) -> Fp8Weight:
    """Return the part `[rows, columns]` of a map's weight.

    `tensors` has the tensors that `fp8_tensors` lists, under the same keys.

    In some formats, each block of a weight has one scale, and `columns` may begin or end inside a
    block. In this case all blocks are split into narrower blocks of equal width, so that `columns`
    begins and ends between two blocks. Each narrower block has the scale of the block that it is
    a part of.
    """
    weight, scales = tensors["weight"], tensors[stored.scale_name]
    num_out, num_in = weight.shape
    if isinstance(stored.scale_shape, ScaleShape):
        scales = scales.view(-1, 1).expand(num_out, 1)
    else:
        out_block, in_block = stored.scale_shape
        start, stop, _ = columns.indices(num_in)
        size = math.gcd(in_block, start, stop)
        scales = scales.repeat_interleave(out_block, 0)[:num_out]
        scales = scales.repeat_interleave(in_block // size, 1)[:, start // size : stop // size]
    return Fp8Weight(weight[rows, columns], scales[rows].contiguous())
