"""Writes new keys and values into the paged cache, in plain torch.

Symbols: `T` tokens, `HKV` kv heads, `D` head dim, `B` blocks, `P` block size.
"""

import torch


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write token t's `key` and `value` [T, HKV, D] to slot `slot_mapping[t]` of the caches.

    The caches are [B, P, HKV, D] views of any block stride; slot = block * P + offset, int64[T].
    Tokens whose slot is PAD_SLOT (-1) are skipped. Two tokens of one slot are a caller's error.
    """
    num_valid = int((slot_mapping >= 0).sum())
    if num_valid < slot_mapping.shape[0]:
        valid = (slot_mapping >= 0).nonzero().squeeze(1)  # [num_valid]
        key, value = key.index_select(0, valid), value.index_select(0, valid)
        slot_mapping = slot_mapping.index_select(0, valid)
    block_size = key_cache.shape[1]
    block_ids, offsets = slot_mapping // block_size, slot_mapping % block_size
    key_cache[block_ids, offsets] = key
    value_cache[block_ids, offsets] = value
