"""Rotates queries and keys, and stores keys and values in the paged cache, in one launch.

Symbols: `T` tokens, `H` query heads, `HKV` kv heads, `D` head dim, `R` rotated dims of a head,
`B` blocks, `P` block size.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202  Triton infers the types inside kernels

import torch
import triton
import triton.language as tl

from kernels.checks import check_caches, check_cos_sin, check_float, check_tensor
from kernels.kv_formats import LARGEST
from kernels.triton.attention.tile import scale_strides
from kernels.triton.quantized_kv import as_bits, largest_of, quantize, scale_of
from kernels.triton.rotary import load_cos_sin, load_rotated, pair_dims, rotate_heads


@triton.jit
def _store_pairs(
    x1,  # fp32 [HEADS, DIMS], already rounded to the model's dtype
    x2,  # as x1
    inside,  # bool [HEADS, DIMS]
    row,  # points to this slot in the cache, [HKV, D]
    scales,  # points to this slot in [B, P, HKV], or None: not quantized
    stride_h,
    HKV: tl.constexpr,
    HALF: tl.constexpr,
    ROTATED: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Store one token's heads, given in the order of `pair_dims`; with `scales`, quantize them."""
    head = tl.arange(0, HEADS).to(tl.int64)
    pointer = row + head[:, None] * stride_h
    first, second = pair_dims(HALF, ROTATED, DIMS)
    if scales is None:
        tl.store(pointer + first, x1.to(row.dtype.element_ty), mask=inside)
        tl.store(pointer + second, x2.to(row.dtype.element_ty), mask=inside)
    else:
        scale = scale_of(tl.maximum(largest_of(x1, 1), largest_of(x2, 1)), LARGEST)
        tl.store(scales + head, scale.to(scales.dtype.element_ty), mask=head < HKV)
        tl.store(pointer + first, quantize(x1, scale[:, None], IS_FP8), mask=inside)
        tl.store(pointer + second, quantize(x2, scale[:, None], IS_FP8), mask=inside)


@triton.jit(
    do_not_specialize_on_alignment=["positions", "slot_mapping"],
)
def _rotary_store_kernel(
    query,  # [T, H, D]
    key,  # [T, HKV, D]
    value,  # [T, HKV, D]
    cos_sin,  # fp32 [max_pos, R]
    positions,  # int64[T]
    key_cache,  # [B, P, HKV, D]
    value_cache,  # [B, P, HKV, D]
    slot_mapping,  # int64[T]
    key_scales,  # bf16 [B, P, HKV], or None: not quantized
    value_scales,  # as key_scales
    query_out,  # [T, H, D], contiguous
    query_stride_t,
    query_stride_h,
    key_stride_t,
    key_stride_h,
    value_stride_t,
    value_stride_h,
    cos_sin_stride,
    key_cache_stride_b,
    key_cache_stride_p,
    key_cache_stride_h,
    value_cache_stride_b,
    value_cache_stride_p,
    value_cache_stride_h,
    key_scale_stride_b,
    key_scale_stride_p,
    value_scale_stride_b,
    value_scale_stride_p,
    H: tl.constexpr,
    HKV: tl.constexpr,
    HALF: tl.constexpr,  # D / 2
    ROTATED: tl.constexpr,  # R / 2
    P: tl.constexpr,
    QUERY_HEADS: tl.constexpr,  # powers of two, at least H, HKV and D / 2
    KEY_HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    LARGEST: tl.constexpr,  # the largest number of a quantized cache's dtype
    IS_FP8: tl.constexpr,
):
    """Rotate queries and keys as `_rotary_kernel` does, and store keys and values.

    A head's first R dims have the halves x1 and x2, which become
    `(x1 * cos - x2 * sin, x2 * cos + x1 * sin)`. Keys and values are stored by
    `cache[slot // P, slot % P, h, d] = new[t, h, d]`, where slot = slot_mapping[t] >= 0. Rotated
    keys are rounded to the dtype of `query` before they are stored or quantized. There is one
    program for each token.
    """
    token = tl.program_id(0).to(tl.int64)
    dtype = query.dtype.element_ty
    row = cos_sin + tl.load(positions + token) * cos_sin_stride
    cos, sin = load_cos_sin(row, dtype, ROTATED, DIMS)
    rotate_heads(
        query + token * query_stride_t,
        query_out + token * H * 2 * HALF,
        query_stride_h,
        2 * HALF,
        cos,
        sin,
        H,
        HALF,
        ROTATED,
        QUERY_HEADS,
        DIMS,
    )
    slot = tl.load(slot_mapping + token)
    if slot < 0:  # PAD_SLOT
        return
    block = slot // P
    offset = slot % P
    y1, y2, inside = load_rotated(
        key + token * key_stride_t, key_stride_h, cos, sin, HKV, HALF, ROTATED, KEY_HEADS, DIMS
    )
    key_scale_row, value_scale_row = None, None
    if key_scales is not None:
        key_scale_row = key_scales + block * key_scale_stride_b + offset * key_scale_stride_p
        value_scale_row = (
            value_scales + block * value_scale_stride_b + offset * value_scale_stride_p
        )
    _store_pairs(
        y1.to(dtype).to(tl.float32),
        y2.to(dtype).to(tl.float32),
        inside,
        key_cache + block * key_cache_stride_b + offset * key_cache_stride_p,
        key_scale_row,
        key_cache_stride_h,
        HKV,
        HALF,
        ROTATED,
        KEY_HEADS,
        DIMS,
        LARGEST,
        IS_FP8,
    )
    value_ptr = (
        value
        + token * value_stride_t
        + tl.arange(0, KEY_HEADS).to(tl.int64)[:, None] * value_stride_h
    )
    first, second = pair_dims(HALF, ROTATED, DIMS)
    _store_pairs(
        tl.load(value_ptr + first, mask=inside, other=0.0).to(tl.float32),
        tl.load(value_ptr + second, mask=inside, other=0.0).to(tl.float32),
        inside,
        value_cache + block * value_cache_stride_b + offset * value_cache_stride_p,
        value_scale_row,
        value_cache_stride_h,
        HKV,
        HALF,
        ROTATED,
        KEY_HEADS,
        DIMS,
        LARGEST,
        IS_FP8,
    )


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

    The op does what `rotary` does, and then what `store_kv` does with the rotated keys. `cos_sin`
    is fp32 [max_pos, R]. Returns the rotated queries, [T, H, D] and contiguous. The caches of
    keys and of values must have the same dtype, quantized or not.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit, or D or R is odd.
    """
    check_float("query", query, 3)
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    for name, new in (("key", key), ("value", value)):
        check_tensor(name, new, (num_tokens, num_kv_heads, head_dim), query.dtype, query)
    check_cos_sin(cos_sin, head_dim, query)
    check_tensor("positions", positions, (num_tokens,), torch.int64, query)
    check_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64, query)
    num_blocks, block_size = key_cache.shape[:2]
    cache_shape = (num_blocks, block_size, num_kv_heads, head_dim)
    check_caches(key_cache, value_cache, key_scales, value_scales, cache_shape, query)
    if value_cache.dtype != key_cache.dtype:
        raise ValueError(f"value_cache has dtype {value_cache.dtype}; it must be {key_cache.dtype}")
    query_out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _rotary_store_kernel[(num_tokens,)](
        query,
        key,
        value,
        cos_sin,
        positions,
        as_bits(key_cache),
        as_bits(value_cache),
        slot_mapping,
        key_scales,
        value_scales,
        query_out,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        cos_sin.stride(0),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *scale_strides(key_scales)[:2],
        *scale_strides(value_scales)[:2],
        H=num_heads,
        HKV=num_kv_heads,
        HALF=head_dim // 2,
        ROTATED=cos_sin.shape[1] // 2,
        P=block_size,
        QUERY_HEADS=triton.next_power_of_2(num_heads),
        KEY_HEADS=triton.next_power_of_2(num_kv_heads),
        DIMS=triton.next_power_of_2(head_dim // 2),
        LARGEST=LARGEST.get(key_cache.dtype, 1.0),
        IS_FP8=key_cache.dtype is torch.float8_e4m3fn,
    )
    return query_out
