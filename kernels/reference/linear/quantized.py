"""Linear maps whose weights have 8 or 4 bits, in plain torch.

Symbols: `T` tokens, `K` input features, `N` output features, `G` groups of input features.
"""

import torch
from torch.nn import functional

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The 16 numbers of MXFP4, indexed by their 4 bits (OCP Microscaling Formats, version 1.0)."""
HALF_RUN = 16
"""Half the length of a run. A run is 32 consecutive 4-bit numbers in a column of a weight. The run
is packed in 16 bytes: the first half in the low nibbles, and the second half in the high
nibbles."""


def quantized_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    has_one_tile: bool = False,
) -> torch.Tensor:
    """Return `x @ w + bias` [T, N] for `x` [T, K], where `w = values * scale + offset`.

    `values` are int8 or float8_e4m3fn [K, N], or uint8 [K / 2, N], where each byte has two numbers
    from 0 to 15, as `pack_nibbles` lays them out. `scales` [G, N] are floats, each for K / G
    consecutive values of a column. `offsets` are like the scales, or None for zeros. K / G is a
    multiple of 32, or G is 1.

    If the scales are uint8, the weight is MXFP4: the numbers in `values` are indices into `E2M1`,
    and the scales are `powers_of_two(scales)`. K / G is 32, and there are no offsets.

    `bias` is [N], of the dtype of `x`.

    Each weight is computed in fp32 and rounded to the dtype of `x`; sums are fp32. With
    `has_one_tile`, the Triton kernel adds in the same order for any T. In plain torch,
    `has_one_tile` has no effect.
    """
    del has_one_tile
    numbers = unpack_nibbles(values) if values.dtype is torch.uint8 else values
    if scales.dtype is torch.uint8:
        numbers = torch.tensor(E2M1, device=x.device)[numbers.int()]
        scales = powers_of_two(scales)
    by_group = numbers.float().view(scales.shape[0], -1, numbers.shape[1])
    weight = by_group * scales.float().unsqueeze(1)
    if offsets is not None:
        weight += offsets.float().unsqueeze(1)
    weight = weight.view(numbers.shape).to(x.dtype)
    return functional.linear(x, weight.t(), bias)


def powers_of_two(stored: torch.Tensor) -> torch.Tensor:
    """Return `2 ** (stored - 127)` in fp32; `stored` is uint8 below 255, in the format e8m0."""
    bits = stored.int() << 23
    return torch.where(bits == 0, 1 << 22, bits).view(torch.float32)  # 2^-127 has no leading one


def pack_nibbles(numbers: torch.Tensor) -> torch.Tensor:
    """Pack `numbers`, uint8[K, N], each at most 15, into uint8[K / 2, N]; K is a multiple of 32."""
    low, high = numbers.view(-1, 2, HALF_RUN, numbers.shape[1]).unbind(1)
    return (low | high << 4).flatten(0, 1)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Undo `pack_nibbles`."""
    runs = packed.view(-1, 1, HALF_RUN, packed.shape[1])
    return torch.cat((runs & 15, runs >> 4), dim=1).flatten(0, 2)
