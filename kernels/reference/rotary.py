"""Rotary position embedding (NeoX half rotation) in plain torch.

Symbols: `T` tokens, `H` query heads, `HKV` kv heads, `D` head dim, `R` rotated dims of a head.
"""

import torch


def rotary(
    query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate each head of `query` [T, H, D] and `key` [T, HKV, D] to its token's position.

    The halves x1, x2 of a head's first R dims become
    `(x1 * cos - x2 * sin, x2 * cos + x1 * sin)`; the other dims are copied. `cos_sin` is
    fp32 [max_pos, R], cos in the first half of a row and sin in the second. cos and sin are
    rounded to the dtype of `query` before use. `positions` is int64[T]. The inputs are not changed.
    """
    rows = cos_sin.index_select(0, positions).to(query.dtype).unsqueeze(1)  # [T, 1, R]
    cos, sin = rows.chunk(2, dim=-1)  # [T, 1, R / 2] each
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    x1, x2, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest), dim=-1)
