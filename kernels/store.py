"""Writes new keys and values into the paged cache.

Symbols: `T` tokens, `HKV` kv heads, `D` head dim, `B` blocks, `P` block size.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202  Triton infers the types inside kernels

import torch
import triton
import triton.language as tl

from kernels.checks import check_float, check_tensor


@triton.jit
def _store_kv_kernel(
    key,  # [T, HKV, D]
    value,  # [T, HKV, D]
    key_cache,  # [B, P, HKV, D]
    value_cache,  # [B, P, HKV, D]
    slot_mapping,  # int64[T]
    key_stride_t,
    key_stride_h,
    value_stride_t,
    value_stride_h,
    key_cache_stride_b,
    key_cache_stride_p,
    key_cache_stride_h,
    value_cache_stride_b,
    value_cache_stride_p,
    value_cache_stride_h,
    HKV: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    COLUMNS: tl.constexpr,  # power of two, at least HKV * D
):
    """`cache[slot // P, slot % P, h, d] = new[t, h, d]` where slot = slot_mapping[t] >= 0.

    One program per token; a column is a pair (head, dim).
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:  # PAD_SLOT
        return
    column = tl.arange(0, COLUMNS)
    inside = column < HKV * D
    head = (column // D).to(tl.int64)
    dim = column % D
    block = slot // P
    offset = slot % P

    new_key = tl.load(key + token * key_stride_t + head * key_stride_h + dim, mask=inside)
    key_row = key_cache + block * key_cache_stride_b + offset * key_cache_stride_p
    tl.store(key_row + head * key_cache_stride_h + dim, new_key, mask=inside)

    new_value = tl.load(value + token * value_stride_t + head * value_stride_h + dim, mask=inside)
    value_row = value_cache + block * value_cache_stride_b + offset * value_cache_stride_p
    tl.store(value_row + head * value_cache_stride_h + dim, new_value, mask=inside)


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write token t's `key` and `value` [T, HKV, D] to slot `slot_mapping[t]` of the caches.

    The caches are [B, P, HKV, D] views of any block stride; slot = block * P + offset, int64[T].
    Tokens whose slot is PAD_SLOT (-1) are skipped. Two tokens of one slot are a caller's error,
    as is a slot of a block that does not exist: slots are not read on the host.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    check_float("key", key, 3)
    num_tokens, num_kv_heads, head_dim = key.shape
    num_blocks, block_size = key_cache.shape[:2]
    cache_shape = (num_blocks, block_size, num_kv_heads, head_dim)
    check_tensor("value", value, (num_tokens, num_kv_heads, head_dim), key.dtype, key)
    check_tensor("key_cache", key_cache, cache_shape, key.dtype, key)
    check_tensor("value_cache", value_cache, cache_shape, key.dtype, key)
    check_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64, key)
    _store_kv_kernel[(num_tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        HKV=num_kv_heads,
        D=head_dim,
        P=block_size,
        COLUMNS=triton.next_power_of_2(num_kv_heads * head_dim),
    )
