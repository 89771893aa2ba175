"""Writes new keys and values into the paged cache, in C.

Symbols: `T` tokens, `HKV` kv heads, `D` head dim, `B` blocks, `P` block size.
"""

import torch

from kernels import reference
from kernels.checks import check_tensor
from kernels.cpu.library import native


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    """Write token t's `key` and `value` [T, HKV, D] to slot `slot_mapping[t]` of the caches.

    The caches are [B, P, HKV, D] views of any block stride; slot = block * P + offset, int64[T].
    Tokens whose slot is PAD_SLOT (-1) are skipped. Two tokens of one slot are a caller's error,
    as is a slot of a block that does not exist. With scales, the caches are quantized, and the
    twin takes over.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    library = native()
    if library is None or key_scales is not None:
        reference.store_kv(
            key, value, key_cache, value_cache, slot_mapping,
            key_scales=key_scales, value_scales=value_scales,
        )  # fmt: skip
        return
    num_tokens, num_kv_heads, head_dim = key.shape
    num_blocks, block_size = key_cache.shape[:2]
    cache_shape = (num_blocks, block_size, num_kv_heads, head_dim)
    check_tensor("key", key, (num_tokens, num_kv_heads, head_dim), key.dtype, key_cache)
    check_tensor("value", value, (num_tokens, num_kv_heads, head_dim), key.dtype, key)
    check_tensor("key_cache", key_cache, cache_shape, key.dtype, key)
    check_tensor("value_cache", value_cache, cache_shape, key.dtype, key)
    check_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64, key)
    library.store_kv(
        key.element_size(), num_tokens, num_kv_heads, head_dim, block_size,
        key.data_ptr(), value.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
        slot_mapping.data_ptr(),
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        *key_cache.stride()[:3], *value_cache.stride()[:3],
    )  # fmt: skip
