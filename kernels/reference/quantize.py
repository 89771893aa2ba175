"""Rows of numbers to what a quantized cache holds, and back, in plain torch.

`kernels.kv_formats` defines both. Symbols: `D` head dim.
"""

from typing import Final

import torch

from kernels.kv_formats import LARGEST, SCALE_DTYPE

_FP8_NUMBERS: Final = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""What each byte stands for."""


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x` [..., D] as numbers of `dtype` [..., D], and scales [...]."""
    numbers = x.float()
    scales = _rounded_up(numbers.abs().amax(-1) / LARGEST[dtype])  # [...]
    divisors = scales.masked_fill(scales == 0, 1.0)  # of rows of zeros
    quotients = numbers / divisors.unsqueeze(-1)
    if dtype is torch.int8:
        quotients = quotients.round()
    return quotients.to(dtype), scales.to(SCALE_DTYPE)


def dequantize(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `numbers` [..., D] times `scales` [...], rounded to `dtype`."""
    if numbers.dtype is torch.float8_e4m3fn and not numbers.is_cuda:
        # A third of the time that a conversion takes there.
        products = torch.take(_FP8_NUMBERS, numbers.view(torch.uint8).long())
    else:
        products = numbers.float()
    return products.mul_(scales.float().unsqueeze(-1)).to(dtype)


def _rounded_up(scales: torch.Tensor) -> torch.Tensor:
    """Round float32 to the next bfloat16 above, if it is none: half as many bits are left."""
    return (scales.view(torch.int32) + 0xFFFF & -0x10000).view(torch.float32)
