"""Writes new keys and values into the paged cache, in C.

Symbols: `T` tokens, `HKV` kv heads, `D` head dim, `B` blocks, `P` block size.
"""

from typing import TypeVar

import torch

from kernels import reference
from kernels.checks import check_caches, check_tensor
from kernels.cpu.library import DTYPES, native
from kernels.cpu.program.caches import LayerCaches, address, kv_format, scale_strides

_Given = TypeVar("_Given", int, str)
"""A number, or the name of one."""


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
    as is a slot of a block that does not exist.

    With `key_scales` and `value_scales`, bfloat16 [B, P, HKV] views, the caches are quantized as
    `kernels.kv_formats` says, to the bits of the twin.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    library = native()
    is_quantized = key_scales is not None or value_scales is not None
    if library is None or (is_quantized and key.dtype not in DTYPES):
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
    check_caches(key_cache, value_cache, key_scales, value_scales, cache_shape, key)
    check_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64, key)
    caches = LayerCaches(key_cache, value_cache, key_scales, value_scales)
    library.store_kv(*store_fields(key, value, caches, num_tokens, slot_mapping.data_ptr()))


def store_fields(
    key: torch.Tensor,
    value: torch.Tensor,
    caches: LayerCaches,
    num_tokens: _Given,
    slot_mapping: _Given,
) -> tuple[int | _Given, ...]:
    """The fields of C's `store_kv`, of tensors as `store_kv` takes them; the mapping's address."""
    return (
        key.element_size(), num_tokens, *key.shape[1:], caches.keys.shape[1], slot_mapping,
        *_side(key, caches.keys, caches.key_scales),
        *_side(value, caches.values, caches.value_scales),
    )  # fmt: skip


def _side(new: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor | None) -> tuple[int, ...]:
    return (
        kv_format(cache, scales), new.data_ptr(), cache.data_ptr(), address(scales),
        *new.stride()[:2], *cache.stride()[:3], *scale_strides(scales),
    )  # fmt: skip
