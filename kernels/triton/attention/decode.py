"""Paged attention for one new token per sequence, split along the KV length.

Symbols: `S` sequences, `H` query heads, `HKV` kv heads, `G` query heads of one kv head, `D` head
dim of values, `REST` numbers that a key has beyond `D` (`tile.py`), `B` blocks, `P` block size, `M`
max blocks per sequence, `N` partial results of a sequence.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202  Triton infers the types inside kernels

import functools
from collections.abc import Callable
from typing import Final

import torch
import triton
import triton.language as tl

from kernels.checks import attention_out, check_attended, check_options, check_rows
from kernels.sequences import Sequences
from kernels.triton.attention.prefill import SharedLaunch, prepare_shared
from kernels.triton.attention.tile import (
    attend_arguments,
    attend_positions,
    group_heads,
    merge_parts,
)
from kernels.triton.configs import DecodeConfig, config_of, num_processors, shape_of
from kernels.triton.launch import Launch

_MIN_SEQS: Final = 256
"""S is rounded up to a power of two of at least this number, so that few variants are compiled."""
_MOST_ROWS: Final = 16
"""With latent attention, a program has at most this many query heads. The number was not
measured."""


@triton.jit
def _splits_of(
    seq_len, shared, window, POSITIONS: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr
):
    """Return where a sequence's splits begin, their size, and their number, which is at least 1.

    Without `window`, the first split begins after the `shared` positions. With `window`, the first
    split begins at the tile in which the newest token's window begins. If `shared` is 0, the start,
    the size and the number of a sequence's splits depend only on the sequence's own length. So
    without shared positions, results do not depend on the batch.
    """
    begin = shared
    if window is not None:
        begin = tl.maximum(seq_len - window, 0) // POSITIONS * POSITIONS
    size = tl.maximum(tl.cdiv(tl.cdiv(seq_len - begin, MAX_SPLITS), SPLIT), 1) * SPLIT
    return begin, size, tl.maximum(tl.cdiv(seq_len - begin, size), 1)


@triton.jit(
    do_not_specialize=["num_seqs", "N", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens", "shared_lens"],
)
def _attend_splits_kernel(
    query,  # [S, H, D + REST]
    key_cache,  # [B, P, HKV, D + REST]
    value_cache,  # [B, P, HKV, D]; None: the keys' first numbers
    key_scales,  # bf16 [B, P, HKV], or None: not quantized
    value_scales,  # as key_scales
    block_tables,  # int32[S, M]
    seq_lens,  # int32[S]
    shared_lens,  # int32[S]: positions that are not attended to here; None: 0
    sinks,  # fp32 [H], or None
    out,  # [S, H, D], contiguous
    partial_out,  # fp32 [S, N, H, D], contiguous
    partial_lse,  # fp32 [S, N, H], contiguous, base 2
    num_seqs,
    N,
    scale_log2,  # scale * log2(e)
    softcap_log2,  # softcap * log2(e), or None
    window,  # positions, or None
    query_stride_t,
    query_stride_h,
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
    table_stride,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    SEQS: tl.constexpr,  # power of two, at least S
    ROWS: tl.constexpr,  # power of two, at least H / HKV and 16
    DIMS: tl.constexpr,  # power of two, at least D and 16
    REST: tl.constexpr,  # numbers of a key that are not of its value
    REST_DIMS: tl.constexpr,  # power of two, at least REST and 16
    POSITIONS: tl.constexpr,  # kv positions of a tile
    SPLIT: tl.constexpr,  # a split's size is a multiple of this
    MAX_SPLITS: tl.constexpr,  # limit on the splits of a sequence; splits grow to keep it
    SHARED_PARTS: tl.constexpr,  # partial results of shared positions, which come first
    NUM_STAGES: tl.constexpr,  # tiles in flight
):
    """Compute `softmax(cap(scale * q K^T)) V` and its log-sum-exp for each split of the positions.

    `cap` applies the softcap, if there is one. A piece of work is a triple (sequence, split, kv
    head). The grid is fixed: of n programs, program i takes pieces i, i + n, i + 2n and so on. Each
    program counts the pieces from `seq_lens`, so no program works on a split that does not exist.
    The G query heads of a piece are the rows of one matrix product.

    If a sequence has one split and no shared positions, its result is written to `out`. Otherwise a
    partial result is written for each split, and `_reduce_splits_kernel` merges the partial
    results. For shared positions, the kernel of `prefill.py` writes partial results, too.
    """
    G: tl.constexpr = H // HKV
    each = tl.arange(0, SEQS)
    all_lens = tl.load(seq_lens + each, mask=each < num_seqs, other=0)
    all_shared = 0
    if shared_lens is not None:
        all_shared = tl.load(shared_lens + each, mask=each < num_seqs, other=0)
    _, _, all_splits = _splits_of(all_lens, all_shared, window, POSITIONS, SPLIT, MAX_SPLITS)
    all_splits = tl.where(each < num_seqs, all_splits, 0)
    ends = tl.cumsum(all_splits, axis=0)
    num_pieces = tl.sum(all_splits, axis=0) * HKV

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    row_mask = (row < G)[:, None] & (dim < D)[None, :]
    for piece in tl.range(tl.program_id(0), num_pieces, tl.num_programs(0), num_stages=1):
        kv_head = piece % HKV
        nth_split = piece // HKV
        seq32 = tl.sum((ends <= nth_split).to(tl.int32), axis=0)
        split = nth_split - tl.sum(tl.where(each < seq32, all_splits, 0), axis=0)
        seq = seq32.to(tl.int64)
        seq_len = tl.load(seq_lens + seq)
        shared = 0
        if shared_lens is not None:
            shared = tl.load(shared_lens + seq)
        splits_begin, size, num_splits = _splits_of(
            seq_len, shared, window, POSITIONS, SPLIT, MAX_SPLITS
        )
        start = splits_begin + split * size
        end = tl.minimum(start + size, seq_len)

        head = (kv_head * G + row).to(tl.int64)
        q_ptr = query + seq * query_stride_t + head[:, None] * query_stride_h + dim[None, :]
        q = tl.load(q_ptr, mask=row_mask, other=0.0)
        q_rest = None
        if REST > 0:
            rest = tl.arange(0, REST_DIMS)
            q_row = query + seq * query_stride_t + head * query_stride_h
            rest_ptr = q_row[:, None] + D + rest[None, :]
            rest_mask = (row < G)[:, None] & (rest < REST)[None, :]
            q_rest = tl.load(rest_ptr, mask=rest_mask, other=0.0)
        row_max = tl.full([ROWS], -1e30, tl.float32)
        row_sum = tl.zeros([ROWS], tl.float32)
        row_position = tl.zeros([ROWS], tl.int32) + (seq_len - 1)
        block_table = block_tables + seq * table_stride
        masked_from = start
        begin = start
        if window is not None:  # the first split's first tile may begin before the window
            begin = tl.maximum(start, seq_len - window)
        else:  # masks are needed only after the tiles that are whole
            masked_from = start + (end - start) // POSITIONS * POSITIONS
        acc, row_max, row_sum = attend_positions(
            q,
            q_rest,
            row_max,
            row_sum,
            row_position,
            kv_head,
            0,
            key_cache,
            value_cache,
            key_scales,
            value_scales,
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
            P,
            D,
            ROWS,
            DIMS,
            REST,
            REST_DIMS,
            DIMS,
            POSITIONS,
            NUM_STAGES,
        )

        is_whole = num_splits == 1
        if shared_lens is not None:
            is_whole &= shared == 0
        if is_whole:
            if sinks is not None:
                sink = tl.load(sinks + head, mask=row < G, other=0.0) * 1.4426950408889634
                largest = tl.maximum(row_max, sink)
                acc *= tl.exp2(row_max - largest)[:, None]
                row_sum = row_sum * tl.exp2(row_max - largest) + tl.exp2(sink - largest)
            attended = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]  # zero if it is empty
            out_ptr = out + (seq * H + head)[:, None] * D + dim[None, :]
            tl.store(out_ptr, attended.to(out.dtype.element_ty), mask=row_mask)
        else:
            partial = (seq * N + SHARED_PARTS + split) * H + head
            partial_ptr = partial_out + partial[:, None] * D + dim[None, :]
            tl.store(partial_ptr, acc / row_sum[:, None], mask=row_mask)
            tl.store(partial_lse + partial, row_max + tl.log2(row_sum), mask=row < G)


@triton.jit(
    do_not_specialize=["N"],
    do_not_specialize_on_alignment=["seq_lens", "shared_lens"],
)
def _reduce_splits_kernel(
    partial_out,  # fp32 [S, N, H, D], contiguous
    partial_lse,  # fp32 [S, N, H], contiguous, base 2
    seq_lens,  # int32[S]
    shared_lens,  # int32[S], or None
    sinks,  # fp32 [H], or None
    out,  # [S, H, D], contiguous
    N,
    window,  # or None
    H: tl.constexpr,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    PARTS: tl.constexpr,  # power of two, at least SHARED_PARTS + MAX_SPLITS
    PART_TILE: tl.constexpr,  # partial results that are added at once
    POSITIONS: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SHARED_PARTS: tl.constexpr,
):
    """Merge the partial results of each sequence, with one program for each sequence and head.

    A sequence with only one partial result is skipped: its result is already in `out`. The host
    does not launch this kernel if the width of the block tables, or the window, allows only one
    partial result per sequence. A CUDA graph usually contains the kernel, because the block tables
    of a graph have the maximum width. If all sequences of a step fit into one split, the programs
    of the kernel end at once, and the launch takes an estimated 2 us per layer. To save this time,
    a second set of graphs would have to be captured and kept in memory.
    """
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    shared = 0
    first = 0
    if shared_lens is not None:
        shared = tl.load(shared_lens + seq)
        first = tl.where(shared > 0, 0, SHARED_PARTS)
    seq_len = tl.load(seq_lens + seq)
    _, _, num_splits = _splits_of(seq_len, shared, window, POSITIONS, SPLIT, MAX_SPLITS)
    is_whole = num_splits == 1
    if shared_lens is not None:
        is_whole &= shared == 0
    if is_whole:
        return
    sink = float("-inf")
    if sinks is not None:
        sink = tl.load(sinks + head) * 1.4426950408889634  # to base 2
    merged = merge_parts(
        partial_out,
        partial_lse,
        (seq * N + first) * H + head,
        SHARED_PARTS - first + num_splits,
        sink,
        H,
        D,
        DIMS,
        PARTS,
        PART_TILE,
    )
    dim = tl.arange(0, DIMS)
    tl.store(out + (seq * H + head) * D + dim, merged.to(out.dtype.element_ty), mask=dim < D)


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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with row s of `query` [S, H, D + REST] to the first `seq_lens[s]` slots of sequence s.

    Returns [S, H, D]. `key_cache` and `value_cache` are views, [B, P, HKV, D + REST] and
    [B, P, HKV, D]; if REST is not 0, `value_cache` is a part of `key_cache`. `block_tables` is
    int32[S, M]. `seq_lens` is int32[S], each at most M * P; the host never reads the lengths, so it
    cannot check them. A sequence of length 0 only pads the batch, and its result is zeros. No bit
    of a sequence's result depends on other sequences, or on S or M, because the splits of a
    sequence depend only on its length. The scratch memory has S * N * H * (D + 1) fp32 numbers,
    where N is the number of splits of a sequence of M * P tokens.

    With `window`, only the last `window` slots of each sequence are read and attended to. With
    `softcap`, each score s becomes `softcap * tanh(s / softcap)`. `sinks`, fp32 [H], has one more
    score for each head. This score is not scaled and has no value vector; it only adds to the
    softmax's denominator.

    With `key_scales` and `value_scales`, bfloat16 [B, P, HKV] views, the caches are quantized as
    `kernels.kv_formats` says. Scores are multiplied by the scales of the keys, and softmax weights
    by the scales of the values, in fp32. The stored numbers are not multiplied, because the
    products would have to be rounded.

    With `out`, contiguous [T, H, D], `query` is [T, H, D + REST], where T is at least S. Only the
    first S rows of `query` are read, and only the first S rows of `out` are written. Returns `out`.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit, or `window` or `softcap` is not
            positive.
    """
    check_rows(len(block_tables), len(query), out)
    sequences = Sequences(block_tables, seq_lens)
    out = attention_out(out, query, value_cache.shape[3])
    launch = prepare_decode(
        query,
        key_cache,
        value_cache,
        scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        key_scales=key_scales,
        value_scales=value_scales,
        out=out,
    )
    launch(sequences)
    return out


def prepare_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    out: torch.Tensor,
) -> Callable[[Sequences], None]:
    """Check the arguments of `paged_attention_decode`; return a function that launches the kernels.

    The function takes the sequences of a step, and can be called for many steps. A launch with S
    sequences overwrites the first S rows of `out`.

    Raises:
        ValueError: `paged_attention_decode` would refuse the arguments.
    """
    check_attended(query, key_cache, value_cache, key_scales, value_scales)
    check_options(query, window, softcap, sinks)
    num_heads, head_dim = out.shape[1:]
    config = config_of(DecodeConfig, query.device, shape_of(query, value_cache))
    heads = group_heads(num_heads, _MOST_ROWS, key_cache, value_cache, key_scales, value_scales)
    block_size, num_kv_heads = heads.key_cache.shape[1:3]
    processors = num_processors(query.device)
    max_splits = triton.cdiv(processors * config.pieces_per_processor, num_kv_heads)
    num_programs = processors * config.programs_per_processor
    splits = {"SPLIT": config.split, "MAX_SPLITS": max_splits}
    arguments = attend_arguments(query, heads, out, config, scale, window, softcap, sinks)
    attend = Launch(
        _attend_splits_kernel,
        arguments
        | splits
        | {"HKV": num_kv_heads, "ROWS": max(16, triton.next_power_of_2(heads.group))},
        {"num_warps": config.num_warps, "num_stages": config.num_stages},
    )
    of_both = ("sinks", "out", "window", "H", "D", "DIMS", "POSITIONS")
    reduce = Launch(_reduce_splits_kernel, {name: arguments[name] for name in of_both} | splits, {})

    @functools.cache
    def of_shared() -> tuple[int, SharedLaunch]:
        return prepare_shared(
            query,
            key_cache,
            value_cache,
            scale,
            softcap=softcap,
            key_scales=key_scales,
            value_scales=value_scales,
            out=out,
        )

    def launch(sequences: Sequences) -> None:
        tables, seq_lens = sequences.block_tables, sequences.seq_lens
        num_seqs, num_blocks = tables.shape
        most_visible = num_blocks * block_size
        shared = sequences.shared
        if window is not None:
            most_visible = min(most_visible, window + config.positions - 1)
            shared = None  # shared blocks may lie before the windows of some sequences
        shared_parts, attend_shared = (0, None) if shared is None else of_shared()
        num_splits = max(1, min(max_splits, triton.cdiv(most_visible, config.split)))
        num_parts = shared_parts + num_splits
        partials = sequences.room(num_seqs, num_parts, num_heads, head_dim)
        lse = sequences.room(num_seqs, num_parts, num_heads)
        if attend_shared is not None:
            attend_shared(sequences, partials, lse)
        num_pieces = num_seqs * num_splits * num_kv_heads
        seqs = max(_MIN_SEQS, triton.next_power_of_2(num_seqs))
        of_step = {
            "seq_lens": seq_lens,
            "shared_lens": None if shared is None else shared.len_of_seq,
            "partial_out": partials,
            "partial_lse": lse,
            "N": num_parts,
            "SHARED_PARTS": shared_parts,
        }
        attend(
            (min(num_programs, num_pieces), 1, 1),
            (seqs, shared_parts),
            block_tables=tables,
            num_seqs=num_seqs,
            table_stride=tables.stride(0),
            SEQS=seqs,
            **of_step,
        )
        if num_parts > 1:
            parts = triton.next_power_of_2(shared_parts + max_splits)
            reduce(
                (num_seqs, num_heads, 1),
                shared_parts,
                PARTS=parts,
                PART_TILE=min(16, parts),
                **of_step,
            )

    return launch
