"""Writes new keys and values into the paged cache, in plain torch.

Symbols: `T` tokens, `HKV` kv heads, `D` head dim, `B` blocks, `P` block size.
"""

import torch

from kernels.reference.quantized_kv import quantize


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    """Write token t's `key` and `value` [T, HKV, D] to slot `slot_mapping[t]` of the caches.

    The caches are [B, P, HKV, D] views of any block stride. `slot_mapping` is int64[T]; a slot is
    block * P + offset. Tokens whose slot is PAD_SLOT (-1) are skipped. The slots of all tokens that
    are not skipped must differ. In latent attention the values are a part of the keys: then `value`
    and `value_cache` are None, and only keys are stored.

    With `key_scales` and `value_scales`, bfloat16 [B, P, HKV] views, the caches are quantized as
    `kernels.kv_formats` says: int8 or float8_e4m3fn.
    """
    num_valid = int((slot_mapping >= 0).sum())
    if num_valid < slot_mapping.shape[0]:
        valid = (slot_mapping >= 0).nonzero().squeeze(1)  # [num_valid]
        key = key.index_select(0, valid)
        value = None if value is None else value.index_select(0, valid)
        slot_mapping = slot_mapping.index_select(0, valid)
    block_size = key_cache.shape[1]
    block_ids, offsets = slot_mapping // block_size, slot_mapping % block_size
    for new, cache, scales in ((key, key_cache, key_scales), (value, value_cache, value_scales)):
        if new is None or cache is None:
            continue
        if scales is None:
            cache[block_ids, offsets] = new
        else:
            numbers, new_scales = quantize(new, cache.dtype)
            # The numbers are stored as bytes: torch cannot scatter every 8-bit dtype everywhere.
            cache.view(torch.uint8)[block_ids, offsets] = numbers.view(torch.uint8)
            scales[block_ids, offsets] = new_scales
