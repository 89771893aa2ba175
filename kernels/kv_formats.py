"""The quantized formats of a KV cache: int8 and fp8 (e4m3), with scales.

A quantized cache has one scale for each row of `head_dim` numbers, that is, for each slot and kv
head. The number that the model uses is the stored number times its scale. For a row x,

    scale = max |x| / LARGEST[dtype], rounded up to SCALE_DTYPE
    stored = x / scale, rounded to nearest, ties to even

The scale is rounded up so that no stored number exceeds the format's largest. So the only error is
that of rounding x / scale. For int8, the error is at most 1/252 of the row's largest number. For
fp8, the error is at most 1/16 of the number itself or, for numbers near 0, 1/455,000 of the row's
largest number. A row with an infinity or NaN gets an infinite scale, so that the row has no finite
numbers when it is read.
"""

from typing import Final

import torch

LARGEST: Final = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The quantized dtypes, each with the largest number that is stored."""
SCALE_DTYPE: Final = torch.bfloat16
"""The dtype of scales. bfloat16 has the range of float32, so any row of finite numbers has a finite
scale."""
