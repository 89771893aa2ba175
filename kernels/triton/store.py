"""Writes new keys and values into the paged cache.

Symbols: `T` tokens, `HKV` kv heads, `D` head dim, `B` blocks, `P` block size.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202  Triton infers the types inside kernels

import torch
import triton
import triton.language as tl

from kernels.checks import check_caches, check_float, check_tensor, check_values
from kernels.kv_formats import LARGEST
from kernels.triton.attention.tile import scale_strides
from kernels.triton.quantized_kv import as_bits, largest_of, quantize, scale_of


@triton.jit(
    do_not_specialize_on_alignment=["slot_mapping"],
)
def _store_kv_kernel(
    key,  # [T, HKV, D]
    value,  # [T, HKV, D], or None: keys alone are stored
    key_cache,  # [B, P, HKV, D]
    value_cache,  # [B, P, HKV, D], or None
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

    There is one program for each token; a column is a pair (head, dim).
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

    if value is not None:
        value_ptr = value + token * value_stride_t + head * value_stride_h + dim
        new_value = tl.load(value_ptr, mask=inside)
        value_row = value_cache + block * value_cache_stride_b + offset * value_cache_stride_p
        tl.store(value_row + head * value_cache_stride_h + dim, new_value, mask=inside)


@triton.jit(
    do_not_specialize_on_alignment=["slot_mapping"],
)
def _store_quantized_kernel(
    new,  # [T, HKV, D]
    cache,  # [B, P, HKV, D], int8 or the bits of e4m3
    scales,  # bf16 [B, P, HKV]
    slot_mapping,  # int64[T]
    new_stride_t,
    new_stride_h,
    cache_stride_b,
    cache_stride_p,
    cache_stride_h,
    scale_stride_b,
    scale_stride_p,
    D: tl.constexpr,
    P: tl.constexpr,
    DIMS: tl.constexpr,  # power of two, at least D
    LARGEST: tl.constexpr,  # the largest number of the cache's dtype
    IS_FP8: tl.constexpr,
):
    """`scale = max_d |new[t, h, d]| / LARGEST`, and `cache[.., d] = new[t, h, d] / scale`.

    Scales and numbers are rounded as `kernels.kv_formats` says; slots are as in `_store_kv_kernel`.
    There is one program for each token and kv head.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:  # PAD_SLOT
        return
    dim = tl.arange(0, DIMS)
    block = slot // P
    offset = slot % P
    row = new + token * new_stride_t + head * new_stride_h
    x = tl.load(row + dim, mask=dim < D, other=0.0).to(tl.float32)
    scale = scale_of(largest_of(x, 0), LARGEST)
    scale_row = scales + block * scale_stride_b + offset * scale_stride_p
    tl.store(scale_row + head, scale.to(scales.dtype.element_ty))
    cache_row = cache + block * cache_stride_b + offset * cache_stride_p + head * cache_stride_h
    tl.store(cache_row + dim, quantize(x, scale, IS_FP8), mask=dim < D)


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
    block * P + offset. Tokens whose slot is PAD_SLOT (-1) are skipped. Two tokens with the same
    slot are an error of the caller, and so is a slot of a block that does not exist. These errors
    are not found, because the host does not read slots. In latent attention the values are a part
    of the keys: then `value` and `value_cache` are None, and only keys are stored.

    With `key_scales` and `value_scales`, bfloat16 [B, P, HKV] views, the caches are quantized as
    `kernels.kv_formats` says: int8 or float8_e4m3fn.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    check_float("key", key, 3)
    num_tokens, num_kv_heads, head_dim = key.shape
    num_blocks, block_size = key_cache.shape[:2]
    cache_shape = (num_blocks, block_size, num_kv_heads, head_dim)
    check_values(value, value_cache, key)
    check_caches(key_cache, value_cache, key_scales, value_scales, cache_shape, key)
    check_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64, key)
    if key_scales is not None:
        sides = (key, key_cache, key_scales), (value, value_cache, value_scales)
        for new, cache, scales in sides:
            if new is None or cache is None or scales is None:
                continue
            _store_quantized_kernel[(num_tokens, num_kv_heads)](
                new,
                as_bits(cache),
                scales,
                slot_mapping,
                *new.stride()[:2],
                *cache.stride()[:3],
                *scale_strides(scales)[:2],
                D=head_dim,
                P=block_size,
                DIMS=triton.next_power_of_2(head_dim),
                LARGEST=LARGEST[cache.dtype],
                IS_FP8=cache.dtype is torch.float8_e4m3fn,
            )
        return
    _store_kv_kernel[(num_tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        *key.stride()[:2],
        *(key if value is None else value).stride()[:2],
        *key_cache.stride()[:3],
        *(key_cache if value_cache is None else value_cache).stride()[:3],
        HKV=num_kv_heads,
        D=head_dim,
        P=block_size,
        COLUMNS=triton.next_power_of_2(num_kv_heads * head_dim),
    )
