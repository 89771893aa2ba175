"""What a cache of keys and values may hold its numbers in beside what the model computes in.

A quantized cache has one scale for each row of `head_dim` numbers, that is, for each slot and kv
head: the number of the model is the stored one times its scale. With x a row,

    scale = max |x| / LARGEST[dtype], rounded up to SCALE_DTYPE
    stored = x / scale, rounded to nearest, ties to even

Rounded up, because what is stored then never exceeds the largest, and the error is at most half a
step of the scale: 1/253 of the row's largest number for int8, and for fp8 (e4m3) 1/16 of the number
itself, or for small ones 1/457,000 of the largest. A row with an infinity or NaN has an infinite
scale, and is not finite when read.
"""

from typing import Final

import torch

LARGEST: Final = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The quantized dtypes, and the largest number of each that is used."""
SCALE_DTYPE: Final = torch.bfloat16
"""Has float32's range, so that no row is too large or too small for a scale."""
