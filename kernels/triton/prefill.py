"""Causal paged attention for chunks of many tokens, of variable length.

Symbols: `T` tokens, `S` sequences, `H` query heads, `HKV` kv heads, `G` query heads of one kv
head, `D` head dim of values, `REST` further numbers of keys (`tile.py`), `B` blocks, `P` block
size, `M` max blocks per sequence.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202  Triton infers the types inside kernels

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from kernels.checks import attention_out, check_attended, check_options
from kernels.sequences import Sequences
from kernels.triton.launch import Launch
from kernels.triton.tile import attend_arguments, attend_positions, group_heads
from kernels.tuning.configs import PrefillConfig, config_of, shape_of


@triton.jit
def _find_sequence(query_start_loc, tile, num_seqs, TOKENS: tl.constexpr):
    """Return the sequence that owns `tile`: the last s with start(s) // TOKENS + s <= tile.

    So each sequence has at least ceil(query_len / TOKENS) tiles, and all together have
    T // TOKENS + S, which the host knows without reading the device. Tiles before the first
    sequence are given to it, too.
    """
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(
    do_not_specialize=["num_seqs", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens", "query_start_loc"],
)
def _attend_chunks_kernel(
    query,  # [T, H, D + REST]
    key_cache,  # [B, P, HKV, D + REST]
    value_cache,  # [B, P, HKV, D]; None: the keys' first numbers
    key_scales,  # bf16 [B, P, HKV], or None: not quantized
    value_scales,  # as key_scales
    block_tables,  # int32[S, M]
    seq_lens,  # int32[S]
    query_start_loc,  # int32[S + 1]
    sinks,  # fp32 [H], or None
    out,  # [T, H, D], contiguous
    num_seqs,
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
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,  # power of two, at least TOKENS * G and 16
    TOKENS: tl.constexpr,  # query tokens of a tile
    DIMS: tl.constexpr,  # power of two, at least D and 16
    REST: tl.constexpr,  # numbers of a key that are not of its value
    REST_DIMS: tl.constexpr,  # power of two, at least REST and 16
    POSITIONS: tl.constexpr,  # kv positions of a tile
    NUM_STAGES: tl.constexpr,  # tiles in flight
):
    """`out[t] = softmax(cap(scale * q[t] K^T)) V` over the positions that token t sees.

    A token sees all positions up to its own, or with a window the last `window` of them. There is
    one program for each kv head and tile of TOKENS query tokens of one sequence. The G heads of
    each token are rows of the same product, so K and V are read once for all of them. The last
    tiles start first: the last tile of a chunk sees the most positions, and the device should not
    end with it.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = _find_sequence(query_start_loc, tile, num_seqs, TOKENS)
    query_start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - query_start
    first = (tile - (query_start // TOKENS + seq)) * TOKENS  # this tile's first token in the chunk
    seq_len = tl.load(seq_lens + seq)
    if first < 0 or first >= query_len or seq_len == 0:
        return

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    index = first + row // G  # token within the chunk
    row_mask = ((row < TOKENS * G) & (index < query_len))[:, None] & (dim < D)[None, :]
    token = (query_start + index).to(tl.int64)
    head = (kv_head * G + row % G).to(tl.int64)
    q_row = query + token * query_stride_t + head * query_stride_h
    q = tl.load(q_row[:, None] + dim[None, :], mask=row_mask, other=0.0)
    q_rest = None
    if REST > 0:
        rest = tl.arange(0, REST_DIMS)
        rest_mask = ((row < TOKENS * G) & (index < query_len))[:, None] & (rest < REST)[None, :]
        q_rest = tl.load(q_row[:, None] + D + rest[None, :], mask=rest_mask, other=0.0)

    end = tl.minimum(seq_len - query_len + first + TOKENS, seq_len)
    # Rows past the chunk see the same as its last token, because a row that sees nothing divides by
    # zero.
    row_position = tl.minimum(seq_len - query_len + index, end - 1)
    if sinks is None:
        # Finite, but below any score: with a window a row may see no position of its first tile.
        row_max = tl.full([ROWS], -1e30, tl.float32)
        row_sum = tl.zeros([ROWS], tl.float32)
    else:  # a sink is like a position that every row sees, with a value of zero
        row_max = tl.load(sinks + head, mask=row < TOKENS * G, other=0.0) * 1.4426950408889634
        row_sum = tl.full([ROWS], 1.0, tl.float32)
    block_table = block_tables + tl.cast(seq, tl.int64) * table_stride
    begin = 0
    if window is None:  # behind the tiles that all rows see
        masked_from = (seq_len - query_len + first + 1) // POSITIONS * POSITIONS
    else:  # the first row's window, from the border of a tile
        begin = tl.maximum(seq_len - query_len + first - window + 1, 0)
        masked_from = begin // POSITIONS * POSITIONS
    acc, row_max, row_sum = attend_positions(
        q,
        q_rest,
        row_max,
        row_sum,
        row_position,
        kv_head,
        key_cache,
        value_cache,
        key_scales,
        value_scales,
        block_table,
        0,
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
        POSITIONS,
        NUM_STAGES,
    )

    out_row = out + (token * H + head) * D
    attended = (acc / row_sum[:, None]).to(out.dtype.element_ty)
    tl.store(out_row[:, None] + dim[None, :], attended, mask=row_mask)


def paged_attention_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with each query token to its sequence's slots up to its own position; [T, H, D].

    Sequence s owns the rows [query_start_loc[s], query_start_loc[s + 1]) of `query`, [T, H, D +
    REST], its last query_len tokens: row i has position seq_len - query_len + i. The keys and
    values of these tokens are already in the caches, as in `paged_attention_decode`. `block_tables`
    is int32[S, M], `seq_lens` int32[S], `query_start_loc` int32[S + 1], which may begin behind 0;
    the host does not read them.
    Rows that belong to no sequence, or to one of length 0, give zeros. A row does not depend on
    other sequences of the batch.

    `window`, `softcap`, `sinks` and the scales are as in `paged_attention_decode`. Tiles outside
    the windows of all query tokens of a program are not read.

    With `out`, contiguous [T, H, D], it writes to that and returns it; what happens to rows of no
    sequence is then undefined.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit, `max_query_len` exceeds T, or an
            option is not positive.
    """
    if out is None:
        out = query.new_zeros((*query.shape[:2], value_cache.shape[3]))
    out = attention_out(out, query, value_cache.shape[3])
    if max_query_len > len(query):
        raise ValueError(f"max_query_len is {max_query_len}, required is at most {len(query)}")
    sequences = Sequences(block_tables, seq_lens, query_start_loc, max_query_len)
    launch = prepare_prefill(
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


def prepare_prefill(
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
    """Check and prepare `paged_attention_prefill`, to be launched on many steps' sequences.

    Each launch overwrites the rows of `out` that belong to its sequences.

    Raises:
        ValueError: as `paged_attention_prefill`.
    """
    check_attended(query, key_cache, value_cache, key_scales, value_scales)
    check_options(query, window, softcap, sinks)
    num_tokens, num_heads, _ = query.shape
    config = config_of(PrefillConfig, query.device, shape_of(query, value_cache))
    heads = group_heads(num_heads, config.rows, key_cache, value_cache, key_scales, value_scales)
    num_kv_heads = heads.key_cache.shape[2]
    rows = max(config.rows, triton.next_power_of_2(heads.group))
    tokens = rows // heads.group
    attend = Launch(
        _attend_chunks_kernel,
        attend_arguments(query, heads, out, config, scale, window, softcap, sinks)
        | {"G": heads.group, "ROWS": rows, "TOKENS": tokens},
        {"num_warps": config.num_warps, "num_stages": config.num_stages},
    )

    def launch(sequences: Sequences) -> None:
        num_seqs = sequences.block_tables.shape[0]
        attend(
            (num_tokens // tokens + num_seqs, num_kv_heads, 1),
            None,
            block_tables=sequences.block_tables,
            seq_lens=sequences.seq_lens,
            query_start_loc=sequences.query_start_loc,
            num_seqs=num_seqs,
            table_stride=sequences.block_tables.stride(0),
        )

    return launch
