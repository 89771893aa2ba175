"""Quantizes and dequantizes rows of numbers for a quantized cache, in plain torch.

`kernels.kv_formats` defines the formats. Symbols: `D` head dim.
"""

import torch

from kernels.kv_formats import LARGEST, SCALE_DTYPE


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x` [..., D] as stored numbers [..., D] of `dtype`, and their scales [...]."""
    numbers = x.float()
    largest = numbers.abs().amax(-1).nan_to_num(nan=torch.inf, posinf=torch.inf)  # [...]
    scales = _rounded_up(largest / LARGEST[dtype])
    divisors = scales.masked_fill(scales == 0, 1.0)  # of rows of zeros
    quotients = numbers / divisors.unsqueeze(-1)
    if dtype is torch.int8:
        quotients = quotients.round()
    return quotients.to(dtype), scales.to(SCALE_DTYPE)


def dequantize(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `numbers` [..., D] times `scales` [...], rounded to `dtype`."""
    # `exact` can hold numbers and scales without rounding, so only the product is rounded.
    exact = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    if numbers.dtype is torch.int8:
        return numbers.to(exact).mul_(scales.to(exact).unsqueeze(-1)).to(dtype)
    # On a CPU, torch converts e4m3 numbers one by one. So instead their bits are shifted to their
    # places in fp16. Read as fp16, the numbers are 2^8 times smaller, because the exponent's bias
    # is 15 in fp16 and 7 in e4m3. The mask removes the copy of the sign that the shift leaves in
    # the exponent.
    halves = numbers.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    factors = scales.to(exact).mul(256.0).unsqueeze(-1)
    return halves.view(torch.float16).to(exact).mul_(factors).to(dtype)


def _rounded_up(scales: torch.Tensor) -> torch.Tensor:
    """Round each scale up to a number that bfloat16 can hold; return float32.

    `scales` are float32, and none is negative.
    """
    return (scales.view(torch.int32) + 0xFFFF & -0x10000).view(torch.float32)
