"""Rotary position embedding (NeoX half rotation) of queries and keys.

Symbols: `T` tokens, `H` query heads, `HKV` kv heads, `D` head dim, `R` rotated dims of a head.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202  Triton infers the types inside kernels

import torch
import triton
import triton.language as tl

from kernels.checks import check_cos_sin, check_float, check_tensor


@triton.jit
def pair_dims(HALF: tl.constexpr, ROTATED: tl.constexpr, DIMS: tl.constexpr):
    """Return the first dims and the second dims of a head's D / 2 pairs of dims, each [1, DIMS].

    The first R / 2 pairs, of dims i and R / 2 + i, are rotated. The dims after R are paired, too.
    """
    dim = tl.arange(0, DIMS)[None, :]
    if ROTATED == HALF:
        return dim, HALF + dim
    is_rotated = dim < ROTATED
    return dim + tl.where(is_rotated, 0, ROTATED), dim + tl.where(is_rotated, ROTATED, HALF)


@triton.jit
def load_rotated(
    x,  # points to one token, [heads, D]
    stride_h,
    cos,  # fp32 [1, DIMS]
    sin,  # fp32 [1, DIMS]
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # D / 2
    ROTATED: tl.constexpr,  # R / 2
    HEADS: tl.constexpr,  # power of two, at least NUM_HEADS
    DIMS: tl.constexpr,  # power of two, at least HALF
):
    """Rotate one token's heads; return the first and the second number of each pair, and a mask.

    All three are [HEADS, DIMS], in the order of `pair_dims`; the numbers are fp32. The mask is true
    for heads and pairs that exist.
    """
    head = tl.arange(0, HEADS).to(tl.int64)[:, None]
    first, second = pair_dims(HALF, ROTATED, DIMS)
    inside = (head < NUM_HEADS) & (tl.arange(0, DIMS)[None, :] < HALF)
    x1 = tl.load(x + head * stride_h + first, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x + head * stride_h + second, mask=inside, other=0.0).to(tl.float32)
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin, inside


@triton.jit
def load_cos_sin(row, dtype: tl.constexpr, ROTATED: tl.constexpr, DIMS: tl.constexpr):
    """Return cos and sin from a table's row [R], rounded to `dtype`, as fp32 [1, DIMS].

    `kernels.reference.rotary` rounds them, too. For pairs that are not rotated, cos is 1 and sin is
    0.
    """
    dim = tl.arange(0, DIMS)
    cos = tl.load(row + dim, mask=dim < ROTATED, other=1.0).to(dtype).to(tl.float32)
    sin = tl.load(row + ROTATED + dim, mask=dim < ROTATED, other=0.0).to(dtype).to(tl.float32)
    return cos[None, :], sin[None, :]


@triton.jit
def rotate_heads(
    x,  # points to one token, [heads, D]
    out,  # as x
    stride_h,
    out_stride_h,
    cos,  # fp32 [1, DIMS]
    sin,  # fp32 [1, DIMS]
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # D / 2
    ROTATED: tl.constexpr,  # R / 2
    HEADS: tl.constexpr,  # power of two, at least NUM_HEADS
    DIMS: tl.constexpr,  # power of two, at least HALF
):
    """Rotate the heads of one token, which `x` points to, and write them to `out`."""
    y1, y2, inside = load_rotated(x, stride_h, cos, sin, NUM_HEADS, HALF, ROTATED, HEADS, DIMS)
    head = tl.arange(0, HEADS).to(tl.int64)[:, None]
    first, second = pair_dims(HALF, ROTATED, DIMS)
    out_ptr = out + head * out_stride_h
    tl.store(out_ptr + first, y1.to(out.dtype.element_ty), mask=inside)
    tl.store(out_ptr + second, y2.to(out.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize_on_alignment=["positions"],
)
def _rotary_kernel(
    query,  # [T, H, D]
    key,  # [T, HKV, D]
    cos_sin,  # fp32 [max_pos, R]
    positions,  # int64[T]
    query_out,  # [T, H, D], contiguous
    key_out,  # [T, HKV, D], contiguous
    query_stride_t,
    query_stride_h,
    key_stride_t,
    key_stride_h,
    cos_sin_stride,
    H: tl.constexpr,
    HKV: tl.constexpr,
    HALF: tl.constexpr,  # D / 2
    ROTATED: tl.constexpr,  # R / 2
    QUERY_HEADS: tl.constexpr,  # powers of two, at least H, HKV and D / 2
    KEY_HEADS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Rotate the halves of each head's first R dims; copy the other dims.

    The halves x1, x2 become `(x1 * cos - x2 * sin, x2 * cos + x1 * sin)`. cos and sin are rounded
    to the dtype of the query. Products and sums are fp32, and the result is rounded once, while
    `kernels.reference.rotary` rounds each product. There is one program for each token.
    """
    token = tl.program_id(0).to(tl.int64)
    row = cos_sin + tl.load(positions + token) * cos_sin_stride
    cos, sin = load_cos_sin(row, query.dtype.element_ty, ROTATED, DIMS)
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
    rotate_heads(
        key + token * key_stride_t,
        key_out + token * HKV * 2 * HALF,
        key_stride_h,
        2 * HALF,
        cos,
        sin,
        HKV,
        HALF,
        ROTATED,
        KEY_HEADS,
        DIMS,
    )


def rotary(
    query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the heads of `query` [T, H, D] and `key` [T, HKV, D] by the positions of their tokens.

    `cos_sin` is fp32 [max_pos, R], cos in the first half of a row and sin in the second; the dims
    of a head after the first R are copied. `positions` is int64[T]. Each position must be below
    max_pos; this is not checked, because the host does not read positions. The inputs may have any
    stride over T and heads, and are not changed; the results are contiguous.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit, or D or R is odd.
    """
    check_float("query", query, 3)
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    check_tensor("key", key, (num_tokens, num_kv_heads, head_dim), query.dtype, query)
    check_cos_sin(cos_sin, head_dim, query)
    check_tensor("positions", positions, (num_tokens,), torch.int64, query)
    query_out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    key_out = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    _rotary_kernel[(num_tokens,)](
        query,
        key,
        cos_sin,
        positions,
        query_out,
        key_out,
        *query.stride()[:2],
        *key.stride()[:2],
        cos_sin.stride(0),
        H=num_heads,
        HKV=num_kv_heads,
        HALF=head_dim // 2,
        ROTATED=cos_sin.shape[1] // 2,
        QUERY_HEADS=triton.next_power_of_2(num_heads),
        KEY_HEADS=triton.next_power_of_2(num_kv_heads),
        DIMS=triton.next_power_of_2(head_dim // 2),
    )
    return query_out, key_out
