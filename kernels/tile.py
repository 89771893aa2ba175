"""One tile of paged attention: the step that decode and prefill repeat.

Symbols: `R` query rows of a tile, `C` kv positions of a tile, `D` head dim, `P` block size.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201  Triton infers the types inside kernels

from typing import Final

import torch
import triton
import triton.language as tl

from kernels.quantized import dequantize

LOG2_E: Final = 1.4426950408889634  # scores are scaled by it, so that exp2 is the exponential

# Elements of K, and of V: three stages of both fit 99 KiB of shared memory. Full fp32 products run
# without tensor cores, unrolled, and spill registers when the tile is larger.
_TILE_ELEMENTS: Final = {torch.float32: 2048, torch.float16: 8192, torch.bfloat16: 8192}


@triton.jit
def attend_tile(
    q,  # [R, D], zero past D
    acc,  # fp32 [R, D]
    row_max,  # fp32 [R]
    row_sum,  # fp32 [R]
    key_head,  # points to this kv head in the key cache [B, P, HKV, D]
    value_head,  # as key_head
    block_table,  # points to this sequence's row, int32[M]
    position,  # int32[C], the positions of this tile
    visible,  # bool [R, C], or [1, C] for all rows alike
    end,  # positions from here on are not read
    scale_log2,
    softcap_log2,  # in the unit of the scores, or None
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
):
    """Return `acc`, `row_max` and `row_sum` after one more tile of the online softmax.

    `m' = max(m, max_c s)`, `l' = l * 2^(m - m') + sum_c 2^(s - m')`, and `acc` likewise with V;
    `s = scale_log2 * q . k` (Milakov and Gimelshein 2018; FlashAttention), with a cap `c` then
    `c * tanh(s / c)`. A row that has seen no position yet and sees none of this tile must have a
    finite maximum. Scores and sums are fp32; products take the dtype of q, without
    TF32; a quantized cache holds numbers of that dtype, times their scales.
    """
    dim = tl.arange(0, DIMS)
    inside = position < end
    block = tl.load(block_table + position // P, mask=inside, other=0).to(tl.int64)
    offset = (position % P).to(tl.int64)

    key_slot = block * key_stride_b + offset * key_stride_p
    key_mask = inside[None, :] & (dim < D)[:, None]
    k = tl.load(key_head + key_slot[None, :] + dim[:, None], mask=key_mask, other=0)
    if key_scales is not None:
        key_scale_slot = block * key_scale_stride_b + offset * key_scale_stride_p
        key_scale = tl.load(key_scales + key_scale_slot, mask=inside, other=0.0).to(tl.float32)
        k = dequantize(k, key_scale[None, :]).to(q.dtype)
    scores = tl.dot(q, k, input_precision="ieee") * scale_log2
    if softcap_log2 is not None:
        # tanh(x) = 1 - 2 / (e^2x + 1); where e^2x overflows it is 1.
        scores = softcap_log2 * (1 - 2 / (tl.exp(2 * scores / softcap_log2) + 1))
    scores = tl.where(visible, scores, float("-inf"))

    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_max[:, None])
    correction = tl.exp2(row_max - new_max)
    row_sum = row_sum * correction + tl.sum(weights, axis=1)

    value_slot = block * value_stride_b + offset * value_stride_p
    value_mask = inside[:, None] & (dim < D)[None, :]
    v = tl.load(value_head + value_slot[:, None] + dim[None, :], mask=value_mask, other=0)
    if value_scales is not None:
        value_scale_slot = block * value_scale_stride_b + offset * value_scale_stride_p
        value_scale = tl.load(value_scales + value_scale_slot, mask=inside, other=0.0)
        v = dequantize(v, value_scale.to(tl.float32)[:, None]).to(q.dtype)
    update = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return acc * correction[:, None] + update, new_max, row_sum


def tile_positions(query: torch.Tensor, dims: int) -> int:
    """Return how many kv positions a tile takes: a power of two between 16 and 64."""
    return max(16, min(64, _TILE_ELEMENTS[query.dtype] // dims))


def scale_strides(scales: torch.Tensor | None) -> tuple[int, int]:
    """Return the strides of [B, P, HKV] over blocks and slots; without scales any do."""
    return (0, 0) if scales is None else (scales.stride(0), scales.stride(1))
