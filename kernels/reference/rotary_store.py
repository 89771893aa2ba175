"""Rotates queries and keys, and stores keys and values in the paged cache, in plain torch.

Symbols: `T` tokens, `H` query heads, `HKV` kv heads, `D` head dim.
"""

import torch

from kernels.reference.rotary import rotary
from kernels.reference.store import store_kv


def rotary_store_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate `query` [T, H, D] and `key` [T, HKV, D]; store the keys and `value` [T, HKV, D].

    The op does what `rotary` does, and then what `store_kv` does with the rotated keys. Returns the
    rotated queries, [T, H, D].
    """
    query, key = rotary(query, key, cos_sin, positions)
    store_kv(
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key_scales=key_scales,
        value_scales=value_scales,
    )
    return query
