"""The loop of paged attention: online softmax over a range of positions, tile by tile.

Symbols: `R` query rows of a tile, `C` kv positions of a tile, `D` head dim of values, `P` block
size.

Usually keys are as wide as values. In multi-head latent attention, keys are wider by `REST`
numbers, and their first D numbers are the values.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202  Triton infers the types inside kernels

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl

from kernels.triton.configs import DecodeConfig, PrefillConfig
from kernels.triton.quantized_kv import as_bits, plain_numbers, unit_of

LOG2_E: Final = 1.4426950408889634  # scores are multiplied by it, so that exp2 can replace exp


@triton.jit
def attend_positions(
    q,  # [R, DIMS], zero past D
    q_rest,  # [R, REST_DIMS], zero past REST; None if REST is 0
    row_max,  # fp32 [R], finite
    row_sum,  # fp32 [R]
    row_position,  # int32[R]: each row sees the positions up to its own
    kv_head,  # index
    value_part,  # index
    key_cache,  # [B, P, HKV, D + REST]
    value_cache,  # [B, P, HKV, D]; None: the keys' first numbers
    key_scales,  # bf16 [B, P, HKV], or None: not quantized
    value_scales,  # as key_scales
    block_table,  # points to this sequence's row, int32[M]
    start,  # a multiple of C: where the positions begin, if there is no window
    masked_from,  # a multiple of C: where tiles begin to need a mask; with a window, the first tile
    begin,  # with a window, positions before this one are not read
    end,  # positions from this one on are not read
    scale_log2,  # scale * log2(e)
    softcap_log2,  # softcap * log2(e), or None
    window,  # how many positions a row sees at most, or None
    key_stride_b,
    key_stride_p,
    key_stride_h,
    value_stride_b,
    value_stride_p,
    value_stride_h,
    key_scale_stride_b,
    key_scale_stride_p,
    key_scale_stride_h,
    value_scale_stride_b,
    value_scale_stride_p,
    value_scale_stride_h,
    P: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,  # R
    DIMS: tl.constexpr,  # power of two, at least D and 16
    REST: tl.constexpr,
    REST_DIMS: tl.constexpr,  # power of two, at least REST and 16
    VALUE_DIMS: tl.constexpr,  # dims of values to compute, from VALUE_DIMS * value_part on
    POSITIONS: tl.constexpr,  # C
    NUM_STAGES: tl.constexpr,
):
    """Return `acc`, `row_max` and `row_sum` of the softmax over the positions up to `end`.

    `row_max` is each row's largest score; scores have the factor log2(e). `row_sum` is the sum of
    the softmax weights 2^(score - row_max). `acc`, fp32 [R, VALUE_DIMS], is the sum of the values
    times their weights.

    The softmax starts from the given `row_max` and `row_sum`, as if they came from earlier
    positions whose values are zero. Without a window, every row sees all positions in
    [start, masked_from), so these positions are computed without a mask, which saves time.
    """
    acc = tl.zeros([ROWS, VALUE_DIMS], tl.float32)
    key_head = key_cache + kv_head.to(tl.int64) * key_stride_h
    value_head = None
    if value_cache is not None:
        value_head = value_cache + kv_head.to(tl.int64) * value_stride_h + value_part * VALUE_DIMS
    key_head_scales = None if key_scales is None else key_scales + kv_head * key_scale_stride_h
    value_head_scales = None
    if value_scales is not None:
        value_head_scales = value_scales + kv_head * value_scale_stride_h
    if window is None:
        acc, row_max, row_sum = _attend_range(
            q,
            q_rest,
            acc,
            row_max,
            row_sum,
            row_position,
            key_head,
            value_head,
            block_table,
            start,
            masked_from,
            begin,
            end,
            scale_log2,
            softcap_log2,
            window,
            key_stride_b,
            key_stride_p,
            value_stride_b,
            value_stride_p,
            key_head_scales,
            value_head_scales,
            key_scale_stride_b,
            key_scale_stride_p,
            value_scale_stride_b,
            value_scale_stride_p,
            P,
            D,
            DIMS,
            REST,
            REST_DIMS,
            VALUE_DIMS,
            POSITIONS,
            IS_MASKED=False,
            NUM_STAGES=NUM_STAGES,
        )
    acc, row_max, row_sum = _attend_range(
        q,
        q_rest,
        acc,
        row_max,
        row_sum,
        row_position,
        key_head,
        value_head,
        block_table,
        masked_from,
        end,
        begin,
        end,
        scale_log2,
        softcap_log2,
        window,
        key_stride_b,
        key_stride_p,
        value_stride_b,
        value_stride_p,
        key_head_scales,
        value_head_scales,
        key_scale_stride_b,
        key_scale_stride_p,
        value_scale_stride_b,
        value_scale_stride_p,
        P,
        D,
        DIMS,
        REST,
        REST_DIMS,
        VALUE_DIMS,
        POSITIONS,
        IS_MASKED=True,
        NUM_STAGES=NUM_STAGES,
    )
    return acc, row_max, row_sum


@triton.jit
def _attend_range(
    q,  # [R, DIMS], zero past D
    q_rest,  # [R, REST_DIMS], zero past REST; None if REST is 0
    acc,  # fp32 [R, VALUE_DIMS]
    row_max,  # fp32 [R], finite
    row_sum,  # fp32 [R]
    row_position,  # int32[R]: each row sees the positions up to its own
    key_head,  # points to this kv head in the key cache [B, P, HKV, D + REST]
    value_head,  # as key_head; None: values are the keys' first numbers
    block_table,  # points to this sequence's row, int32[M]
    low,  # the range is [low, high): multiples of C
    high,
    begin,  # with a window, positions before this one are not read
    end,  # positions from this one on are not read
    scale_log2,  # scale * log2(e)
    softcap_log2,  # softcap * log2(e), or None
    window,  # how many positions a row sees at most, or None
    key_stride_b,
    key_stride_p,
    value_stride_b,
    value_stride_p,
    key_scales,  # points to this kv head in [B, P, HKV], or None: not quantized
    value_scales,  # as key_scales
    key_scale_stride_b,
    key_scale_stride_p,
    value_scale_stride_b,
    value_scale_stride_p,
    P: tl.constexpr,
    D: tl.constexpr,
    DIMS: tl.constexpr,  # power of two, at least D and 16
    REST: tl.constexpr,
    REST_DIMS: tl.constexpr,  # power of two, at least REST and 16
    VALUE_DIMS: tl.constexpr,  # power of two; DIMS, or a part of it if D is DIMS
    POSITIONS: tl.constexpr,  # C
    IS_MASKED: tl.constexpr,  # false: each row sees the whole range, which `end` does not cut
    NUM_STAGES: tl.constexpr,
):
    """Return `acc`, `row_max` and `row_sum` after the positions [low, high), in tiles of C.

    Each tile updates the online softmax (Milakov and Gimelshein 2018; FlashAttention). With m for
    `row_max`, l for `row_sum`, and s for the scores of the tile's C positions, the update is
    `m' = max(m, max_c s)`, `l' = l * 2^(m - m') + sum_c 2^(s - m')`, and `acc` likewise with V. A
    score is `s = scale_log2 * q . k`; with a softcap, s then becomes
    `softcap_log2 * tanh(s / softcap_log2)`.

    Scores and sums are fp32. The operands of products have the dtype of `q`, and TF32 is not used.
    The numbers of a quantized cache are not dequantized one by one: instead, a position's scores
    are multiplied by the scale of its key, and the weight of its value is multiplied by the scale
    of this value.
    """
    dim = tl.arange(0, DIMS)
    dim_mask = dim < D
    rest = tl.arange(0, REST_DIMS)
    for start in tl.range(low, high, POSITIONS, num_stages=NUM_STAGES):
        position = start + tl.arange(0, POSITIONS)
        inside = position < end
        if window is not None:
            inside &= position >= begin
        if P % POSITIONS == 0:  # a tile lies in one block, and at least one of its slots is read
            block = tl.load(block_table + start // P).to(tl.int64)
            offset = (start % P + tl.arange(0, POSITIONS)).to(tl.int64)
        elif IS_MASKED:
            block = tl.load(block_table + position // P, mask=inside, other=0).to(tl.int64)
            offset = (position % P).to(tl.int64)
        else:
            block = tl.load(block_table + position // P).to(tl.int64)
            offset = (position % P).to(tl.int64)

        key_row = key_head + (block * key_stride_b + offset * key_stride_p)[None, :]
        k = _load(key_row + dim[:, None], inside[None, :], dim_mask[:, None], IS_MASKED, D == DIMS)
        keys = plain_numbers(k, q.dtype)
        scores = tl.dot(q, keys, input_precision="ieee")
        if q_rest is not None:
            rest_ptr, rest_mask = key_row + D + rest[:, None], (rest < REST)[:, None]
            k_rest = _load(rest_ptr, inside[None, :], rest_mask, IS_MASKED, REST == REST_DIMS)
            scores += tl.dot(q_rest, plain_numbers(k_rest, q.dtype), input_precision="ieee")
        scores *= scale_log2
        if key_scales is not None:
            key_scale_ptr = key_scales + block * key_scale_stride_b + offset * key_scale_stride_p
            key_scale = tl.load(key_scale_ptr, mask=inside, other=0.0).to(tl.float32)
            scores *= (key_scale * unit_of(k))[None, :]
        if softcap_log2 is not None:
            # tanh(x) = 1 - 2 / (e^2x + 1), which is 1 if e^2x overflows.
            scores = softcap_log2 * (1 - 2 / (tl.exp(2 * scores / softcap_log2) + 1))
        if IS_MASKED:
            visible = inside[None, :] & (position[None, :] <= row_position[:, None])
            if window is not None:
                visible &= position[None, :] > row_position[:, None] - window
            scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_max[:, None])
        correction = tl.exp2(row_max - new_max)
        row_sum = row_sum * correction + tl.sum(weights, axis=1)
        row_max = new_max

        if value_head is None:
            v, numbers = k, tl.trans(keys)
        else:
            value_slot = block * value_stride_b + offset * value_stride_p
            value_dim = tl.arange(0, VALUE_DIMS)
            value_ptr = value_head + value_slot[:, None] + value_dim[None, :]
            value_mask = (value_dim < D)[None, :]
            v = _load(value_ptr, inside[:, None], value_mask, IS_MASKED, D == DIMS)
            numbers = plain_numbers(v, q.dtype)
        if value_scales is not None:
            value_scale_slot = block * value_scale_stride_b + offset * value_scale_stride_p
            value_scale = tl.load(value_scales + value_scale_slot, mask=inside, other=0.0)
            weights *= (value_scale.to(tl.float32) * unit_of(v))[None, :]
        acc *= correction[:, None]
        acc += tl.dot(weights.to(numbers.dtype), numbers, input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit
def merge_parts(
    partial_out,  # fp32 [*, H, D], contiguous
    partial_lse,  # fp32 [*, H], contiguous, base 2; -inf: the part has no positions
    place,  # index of the first part among [*, H]
    num_parts,
    sink,  # a score that joins the softmax, base 2; -inf: none
    H: tl.constexpr,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    PARTS: tl.constexpr,  # power of two, at least num_parts
    PART_TILE: tl.constexpr,  # parts that are added at once
):
    """Merge partial results: `sum_n 2^lse_n out_n / (2^sink + sum_n 2^lse_n)`, fp32 [DIMS].

    `place` is the index of the first partial result if `partial_lse` is read as an array with one
    dimension. The index of each further partial result is greater by H than the one before. If none
    of the partial results covers a position, the merged result is zero. To avoid overflow, the
    largest exponent is subtracted from all exponents.
    """
    dim = tl.arange(0, DIMS)
    part = tl.arange(0, PARTS)
    lse = tl.load(partial_lse + place + part * H, mask=part < num_parts, other=float("-inf"))
    largest = tl.maximum(tl.maximum(tl.max(lse, axis=0), sink), -1e30)
    total = tl.sum(tl.exp2(lse - largest), axis=0) + tl.exp2(sink - largest)
    merged = tl.zeros([DIMS], tl.float32)
    for first in range(0, num_parts, PART_TILE):
        nth = first + tl.arange(0, PART_TILE)
        row = place + nth.to(tl.int64) * H
        exponent = tl.load(partial_lse + row, mask=nth < num_parts, other=float("-inf"))
        values = tl.load(
            partial_out + row[:, None] * D + dim[None, :],
            mask=(exponent > float("-inf"))[:, None] & (dim < D)[None, :],
            other=0.0,
        )
        merged += tl.sum(values * tl.exp2(exponent - largest)[:, None], axis=0)
    return merged / tl.where(total > 0, total, 1.0)


@triton.jit
def _load(pointer, inside, dim_mask, IS_MASKED: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Load a tile with only the masks that it needs, as a mask costs an instruction per number."""
    if IS_MASKED and IS_WHOLE:
        tile = tl.load(pointer, mask=inside, other=0)
    elif IS_MASKED:
        tile = tl.load(pointer, mask=inside & dim_mask, other=0)
    elif IS_WHOLE:
        tile = tl.load(pointer)
    else:
        tile = tl.load(pointer, mask=dim_mask, other=0)
    return tile


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """How query heads are grouped into programs, and the caches as the programs see them."""

    group: int
    """Number of query heads per kv head."""
    key_cache: torch.Tensor
    """[B, P, HKV, D + REST]."""
    value_cache: torch.Tensor | None
    """[B, P, HKV, D]; None: values are the keys' first numbers."""
    key_scales: torch.Tensor | None
    """[B, P, HKV]; None: not quantized."""
    value_scales: torch.Tensor | None


def group_heads(
    num_heads: int,
    most: int,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> Heads:
    """Group the query heads by kv head; with latent attention, first repeat the only kv head.

    A program holds a weighted sum of values in registers for each of its query heads. Latents are
    so wide that the registers are too few for all query heads. So with latents, the only kv head is
    repeated, without a copy, and each repetition gets at most `most` of the query heads.

    Raises:
        ValueError: Keys and values differ in width, but are not latents. With latents, values are
            the first numbers of the keys, and there is only one kv head.
    """
    group = num_heads // key_cache.shape[2]
    if value_cache.shape[3] == key_cache.shape[3]:
        return Heads(group, key_cache, value_cache, key_scales, value_scales)
    if value_cache.data_ptr() != key_cache.data_ptr() or value_cache.stride() != key_cache.stride():
        raise ValueError(
            f"value_cache has head dim {value_cache.shape[3]}; it must be {key_cache.shape[3]}, or"
            " the first numbers of key_cache"
        )
    if key_cache.shape[2] != 1:
        raise ValueError(f"key_cache has {key_cache.shape[2]} heads; it must have 1 with latents")
    repeated = next(count for count in range(min(group, most), 0, -1) if group % count == 0)
    num_kv_heads = group // repeated
    scales = None if key_scales is None else key_scales.expand(-1, -1, num_kv_heads)
    return Heads(repeated, key_cache.expand(-1, -1, num_kv_heads, -1), None, scales, scales)


def attend_arguments(
    query: torch.Tensor,
    heads: Heads,
    out: torch.Tensor,
    config: DecodeConfig | PrefillConfig,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> dict[str, Any]:
    """Return the arguments that the decode and prefill kernels have in common, by name."""
    values = heads.key_cache if heads.value_cache is None else heads.value_cache
    _, num_heads, query_dim = query.shape
    head_dim = out.shape[2]
    rest = query_dim - head_dim
    return {
        "query": query,
        "key_cache": as_bits(heads.key_cache),
        "value_cache": None if heads.value_cache is None else as_bits(heads.value_cache),
        "key_scales": heads.key_scales,
        "value_scales": heads.value_scales,
        "sinks": sinks,
        "out": out,
        "scale_log2": scale * LOG2_E,
        "softcap_log2": None if softcap is None else softcap * LOG2_E,
        "window": window,
        **_strides("query", "th", query.stride()),
        **_strides("key", "bph", heads.key_cache.stride()),
        **_strides("value", "bph", values.stride()),
        **_strides("key_scale", "bph", scale_strides(heads.key_scales)),
        **_strides("value_scale", "bph", scale_strides(heads.value_scales)),
        "H": num_heads,
        "D": head_dim,
        "P": heads.key_cache.shape[1],
        "DIMS": max(16, triton.next_power_of_2(head_dim)),
        "REST": rest,
        "REST_DIMS": max(16, triton.next_power_of_2(rest)),
        "POSITIONS": config.positions,
        "NUM_STAGES": config.num_stages,
    }


def _strides(name: str, dims: str, values: Sequence[int]) -> dict[str, int]:
    return {f"{name}_stride_{dim}": value for dim, value in zip(dims, values, strict=False)}


def scale_strides(scales: torch.Tensor | None) -> tuple[int, ...]:
    """Return the strides of scales [B, P, HKV], or zeros if there are none."""
    return (0, 0, 0) if scales is None else scales.stride()
