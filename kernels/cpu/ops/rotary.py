"""Rotary position embedding (NeoX half rotation) in C.

Symbols: `T` tokens, `H` query heads, `HKV` kv heads, `D` head dim.
"""

import torch

from kernels import reference
from kernels.checks import check_tensor
from kernels.cpu.library import DTYPES, native


def rotary(
    query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate each head of `query` [T, H, D] and `key` [T, HKV, D] to its token's position.

    `cos_sin` is fp32 [max_pos, D], cos in the first half of a row and sin in the second; both are
    rounded to the dtype of `query`. `positions` is int64[T], each below max_pos: that is not
    checked. The inputs, of any stride over T and heads, stay as they are.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit, or D is odd.
    """
    library, dtype = native(), DTYPES.get(query.dtype)
    if library is None or dtype is None:
        return reference.rotary(query, key, cos_sin, positions)
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    if head_dim % 2 != 0:
        raise ValueError(f"query has head dim {head_dim}, required is a multiple of 2")
    check_tensor("query", query, (num_tokens, num_heads, head_dim), query.dtype, cos_sin)
    check_tensor("key", key, (num_tokens, num_kv_heads, head_dim), query.dtype, query)
    check_tensor("cos_sin", cos_sin, (cos_sin.shape[0], head_dim), torch.float32, query)
    check_tensor("positions", positions, (num_tokens,), torch.int64, query)
    query_out, key_out = query.new_empty(query.shape), key.new_empty(key.shape)
    library.rotary(
        dtype, num_tokens, num_heads, num_kv_heads, head_dim // 2,
        query.data_ptr(), key.data_ptr(), cos_sin.data_ptr(), positions.data_ptr(),
        query_out.data_ptr(), key_out.data_ptr(),
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), cos_sin.stride(0),
    )  # fmt: skip
    return query_out, key_out
