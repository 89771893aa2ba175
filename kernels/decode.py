"""Paged attention for one new token per sequence, split along the KV length.

Symbols: `S` sequences, `H` query heads, `HKV` kv heads, `G` query heads of one kv head, `D` head
dim, `B` blocks, `P` block size, `M` max blocks per sequence, `N` splits of the longest sequence.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202  Triton infers the types inside kernels

from typing import Final

import torch
import triton
import triton.language as tl

from kernels.checks import check_options, check_paged
from kernels.quantized import as_bits
from kernels.tile import LOG2_E, attend_tile, scale_strides, tile_positions

_MIN_SPLIT: Final = 256  # tokens: enough splits for an idle device, few enough to reduce
_MAX_SPLITS: Final = 64  # bounds the partial results; past 16,384 tokens splits grow instead


@triton.jit
def _split_size(seq_len, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Return the tokens per split: of its own length only, so that a batch changes no result."""
    return tl.maximum(tl.cdiv(tl.cdiv(seq_len, MAX_SPLITS), MIN_SPLIT), 1) * MIN_SPLIT


@triton.jit
def _num_visible(seq_len, window):
    """Return how many of a sequence's last tokens its newest one sees."""
    return seq_len if window is None else tl.minimum(seq_len, window)


@triton.jit
def _attend_splits_kernel(
    query,  # [S, H, D]
    key_cache,  # [B, P, HKV, D]
    value_cache,  # [B, P, HKV, D]
    key_scales,  # bf16 [B, P, HKV], or None: not quantized
    value_scales,  # as key_scales
    block_tables,  # int32[S, M]
    seq_lens,  # int32[S]
    partial_out,  # fp32 [S, H, N, D], contiguous
    partial_lse,  # fp32 [S, H, N], contiguous, base 2
    scale_log2,
    softcap_log2,  # or None
    window,  # or None
    query_stride_s,
    query_stride_h,
    key_stride_b,
    key_stride_p,
    key_stride_h,
    value_stride_b,
    value_stride_p,
    value_stride_h,
    key_scale_stride_b,
    key_scale_stride_p,
    value_scale_stride_b,
    value_scale_stride_p,
    table_stride,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,  # power of two, at least G and 16
    DIMS: tl.constexpr,  # power of two, at least D and 16
    POSITIONS: tl.constexpr,  # kv positions of a tile
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """`out = softmax(cap(scale * q K^T)) V` and its log-sum-exp over one split of the positions.

    One program per sequence, kv head and split; its G query heads are the rows of one product.
    Splits begin where the window does; those past the end of the sequence write nothing.
    """
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    seq_len = tl.load(seq_lens + seq)
    num_visible = _num_visible(seq_len, window)
    split_size = _split_size(num_visible, MIN_SPLIT, MAX_SPLITS)
    start = seq_len - num_visible + split * split_size
    if start >= seq_len:
        return
    end = tl.minimum(start + split_size, seq_len)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    head = (kv_head * G + row).to(tl.int64)
    row_mask = (row < G)[:, None] & (dim < D)[None, :]
    q_ptr = query + seq * query_stride_s + head[:, None] * query_stride_h + dim[None, :]
    q = tl.load(q_ptr, mask=row_mask, other=0.0)

    acc = tl.zeros([ROWS, DIMS], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    key_head_scales = None if key_scales is None else key_scales + kv_head
    value_head_scales = None if value_scales is None else value_scales + kv_head
    for tile in range(start, end, POSITIONS):
        position = tile + tl.arange(0, POSITIONS)
        acc, row_max, row_sum = attend_tile(
            q,
            acc,
            row_max,
            row_sum,
            key_cache + kv_head.to(tl.int64) * key_stride_h,
            value_cache + kv_head.to(tl.int64) * value_stride_h,
            block_tables + seq * table_stride,
            position,
            (position < end)[None, :],
            end,
            scale_log2,
            softcap_log2,
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
        )

    partial = (seq * H + head) * num_splits + split
    tl.store(
        partial_out + partial[:, None] * D + dim[None, :], acc / row_sum[:, None], mask=row_mask
    )
    tl.store(partial_lse + partial, row_max + tl.log2(row_sum), mask=row < G)


@triton.jit
def _reduce_splits_kernel(
    partial_out,  # fp32 [S, H, N, D], contiguous
    partial_lse,  # fp32 [S, H, N], contiguous, base 2
    seq_lens,  # int32[S]
    sinks,  # fp32 [H], or None
    out,  # [S, H, D], contiguous
    N,
    window,  # or None
    H: tl.constexpr,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """`out = sum_n 2^lse_n out_n / (2^sink + sum_n 2^lse_n)`, zero without splits.

    One program per sequence and head. Exponents are taken less the largest of them; without sinks
    there is no such term.
    """
    seq = tl.program_id(0).to(tl.int64)
    row = seq * H + tl.program_id(1)
    dim = tl.arange(0, DIMS)
    seq_len = tl.load(seq_lens + seq)
    if seq_len == 0:
        tl.store(out + row * D + dim, tl.zeros([DIMS], out.dtype.element_ty), mask=dim < D)
        return
    split = tl.arange(0, MAX_SPLITS)
    num_visible = _num_visible(seq_len, window)
    written = split < tl.cdiv(num_visible, _split_size(num_visible, MIN_SPLIT, MAX_SPLITS))
    lse = tl.load(partial_lse + row * N + split, mask=written, other=float("-inf"))
    sink = float("-inf")
    if sinks is not None:
        sink = tl.load(sinks + tl.program_id(1)) * 1.4426950408889634  # to base 2
    largest = tl.maximum(tl.max(lse, axis=0), sink)
    weights = tl.exp2(lse - largest)
    total = tl.sum(weights, axis=0) + tl.exp2(sink - largest)
    partial = tl.load(
        partial_out + (row * N + split)[:, None] * D + dim[None, :],
        mask=written[:, None] & (dim < D)[None, :],
        other=0.0,
    )
    merged = tl.sum(partial * weights[:, None], axis=0) / total
    tl.store(out + row * D + dim, merged.to(out.dtype.element_ty), mask=dim < D)


def paged_attention_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with `query` [S, H, D] to each sequence's first `seq_lens` slots; [S, H, D].

    The caches are [B, P, HKV, D] views, `block_tables` int32[S, M], `seq_lens` int32[S], each at
    most M * P: that is not read on the host. A sequence of length 0 is a padding row and gives
    zeros. A row depends on no other row of the batch, to the last bit, nor on S or M: splits follow
    from the sequence's own length. Needs fp32 scratch of S * H * min(64, M * P / 256) * (D + 1).

    With `window` only the last so many slots are attended to, and read; with `softcap` the scores s
    become `softcap * tanh(s / softcap)`; `sinks`, fp32 [H], join the softmax's denominator as one
    more score of each head, as it is.

    With `key_scales` and `value_scales`, bfloat16 [B, P, HKV] views, the caches are quantized as
    `kernels.kv_formats` says; K and V are what they then hold, rounded to the dtype of `query`.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit, or an option is not positive.
    """
    check_paged(query, key_cache, value_cache, block_tables, seq_lens, key_scales, value_scales)
    check_options(query, window, softcap, sinks)
    num_seqs, num_heads, head_dim = query.shape
    if block_tables.shape[0] != num_seqs:
        raise ValueError(f"block_tables has {block_tables.shape[0]} rows, required are {num_seqs}")
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    dims = max(16, triton.next_power_of_2(head_dim))
    most_visible = block_tables.shape[1] * block_size
    if window is not None:
        most_visible = min(most_visible, window)
    num_splits = min(_MAX_SPLITS, triton.cdiv(most_visible, _MIN_SPLIT))
    partial_shape = (num_seqs, num_heads, num_splits)
    partial_out = query.new_empty((*partial_shape, head_dim), dtype=torch.float32)
    partial_lse = query.new_empty(partial_shape, dtype=torch.float32)
    _attend_splits_kernel[(num_seqs, num_kv_heads, num_splits)](
        query,
        as_bits(key_cache),
        as_bits(value_cache),
        key_scales,
        value_scales,
        block_tables,
        seq_lens,
        partial_out,
        partial_lse,
        scale * LOG2_E,
        None if softcap is None else softcap * LOG2_E,
        window,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *scale_strides(key_scales),
        *scale_strides(value_scales),
        block_tables.stride(0),
        H=num_heads,
        G=group,
        D=head_dim,
        P=block_size,
        ROWS=max(16, triton.next_power_of_2(group)),
        DIMS=dims,
        POSITIONS=tile_positions(query, dims),
        MIN_SPLIT=_MIN_SPLIT,
        MAX_SPLITS=_MAX_SPLITS,
    )
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _reduce_splits_kernel[(num_seqs, num_heads)](
        partial_out,
        partial_lse,
        seq_lens,
        sinks,
        out,
        num_splits,
        window,
        H=num_heads,
        D=head_dim,
        DIMS=dims,
        MIN_SPLIT=_MIN_SPLIT,
        MAX_SPLITS=_MAX_SPLITS,
    )
    return out
