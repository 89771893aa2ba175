"""Causal paged attention for chunks of many tokens, of variable length.

Symbols: `T` tokens, `S` sequences, `H` query heads, `HKV` kv heads, `G` query heads of one kv
head, `D` head dim of values, `REST` numbers that a key has beyond `D` (`tile.py`), `B` blocks, `P`
block size, `M` max blocks per sequence, `N` partial results of a token.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202  Triton infers the types inside kernels

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import triton
import triton.language as tl

from kernels.checks import attention_out, check_attended, check_options
from kernels.sequences import MAX_SHARED, Sequences
from kernels.triton.attention.tile import (
    attend_arguments,
    attend_positions,
    group_heads,
    merge_parts,
)
from kernels.triton.configs import PrefillConfig, config_of, num_processors, shape_of
from kernels.triton.launch import Launch

MAX_SPLITS: Final = 32
_LEAST_POSITIONS: Final = 512
"""The positions that a tile of query tokens sees may be divided into splits. A split has at least
this many positions. The number was not measured."""


@triton.jit
def _find_sequence(query_start_loc, tile, num_seqs, TOKENS: tl.constexpr):
    """Return the sequence that owns `tile`: the last s whose first tile is at most `tile`.

    The tiles of sequence s begin at the number query_start_loc[s] // TOKENS + s, and end where the
    tiles of sequence s + 1 begin. Because of the `+ s`, rounding down never leaves a sequence with
    fewer than ceil(query_len / TOKENS) tiles. All sequences together have T // TOKENS + S tiles, a
    number that the host knows without reading the device. If query_start_loc[0] is not 0, there may
    be tiles before the first tile of sequence 0. These tiles have no tokens, and count as tiles of
    sequence 0.
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
    do_not_specialize=["num_seqs", "N", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens", "query_start_loc", "sharing"],
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
    sharing,  # int32[*]: which rows of query and block_tables to read; None: 0, 1, ...
    sinks,  # fp32 [H], or None
    out,  # [T, H, D], contiguous
    partial_out,  # fp32 [T, N, H, D], contiguous; None: positions are not split
    partial_lse,  # fp32 [T, N, H], contiguous, base 2
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
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,  # power of two, at least TOKENS * G and 16
    TOKENS: tl.constexpr,  # query tokens of a tile
    DIMS: tl.constexpr,  # power of two, at least D and 16
    REST: tl.constexpr,  # numbers of a key that are not of its value
    REST_DIMS: tl.constexpr,  # power of two, at least REST and 16
    VALUE_PARTS: tl.constexpr,  # programs that share the dims of values; if several, D is DIMS
    POSITIONS: tl.constexpr,  # kv positions of a tile
    LEAST_POSITIONS: tl.constexpr,  # a split's size is a multiple of this
    NUM_STAGES: tl.constexpr,  # tiles in flight
):
    """`out[t] = softmax(cap(scale * q[t] K^T)) V` over the positions that token t sees.

    `cap` applies the softcap, if there is one. A token sees all positions up to its own, or with a
    window the last `window` of them. There is one program for each pair of a kv head and a tile of
    TOKENS query tokens of one sequence. If values are wide, each such pair has several programs,
    each for a part of the values' dims. The G heads of each token are rows of the same matrix
    product, so K and V are read once for all G heads. The last tiles start first, because the last
    tile of a chunk sees the most positions, and should not be the last to end.

    With `partial_out`, each split of a tile's positions has its own program, which leaves a partial
    result for `_merge_chunks_kernel`.

    With `sharing`, the S sequences are prefixes. Each prefix is shared by several sequences of a
    decode step, which have one token each and see all positions of the prefix. The blocks of the
    prefix are read from the block table of the first of these sequences.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // VALUE_PARTS
    value_part = tl.program_id(1) % VALUE_PARTS
    seq = _find_sequence(query_start_loc, tile, num_seqs, TOKENS)
    query_start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - query_start
    first = (tile - (query_start // TOKENS + seq)) * TOKENS  # this tile's first token in the chunk
    seq_len = tl.load(seq_lens + seq)
    if first < 0 or first >= query_len:
        return
    if partial_out is None and seq_len == 0:  # partial results are written even without positions
        return

    # The tile's rows see the positions [begin, tile_end). `start` is `begin` rounded down to a tile
    # of positions.
    tile_end = seq_len
    if sharing is None:
        tile_end = tl.minimum(seq_len - query_len + first + TOKENS, seq_len)
    begin = 0
    if window is not None:
        begin = tl.maximum(seq_len - query_len + first - window + 1, 0)
    start = begin // POSITIONS * POSITIONS
    end = tile_end
    split = tl.program_id(2)
    if partial_out is not None:
        most = tl.cdiv(end - start, tl.num_programs(2))
        size = tl.maximum(tl.cdiv(most, LEAST_POSITIONS), 1) * LEAST_POSITIONS
        start += split * size
        end = tl.minimum(start + size, tile_end)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    index = first + row // G  # token within the chunk
    row_mask = ((row < TOKENS * G) & (index < query_len))[:, None] & (dim < D)[None, :]
    token = (query_start + index).to(tl.int64)
    table = tl.cast(seq, tl.int64)
    if sharing is not None:
        token = tl.load(sharing + token, mask=index < query_len, other=0).to(tl.int64)
        table = tl.load(sharing + query_start).to(tl.int64)
    head = (kv_head * G + row % G).to(tl.int64)
    q_row = query + token * query_stride_t + head * query_stride_h
    q = tl.load(q_row[:, None] + dim[None, :], mask=row_mask, other=0.0)
    q_rest = None
    if REST > 0:
        rest = tl.arange(0, REST_DIMS)
        rest_mask = ((row < TOKENS * G) & (index < query_len))[:, None] & (rest < REST)[None, :]
        q_rest = tl.load(q_row[:, None] + D + rest[None, :], mask=rest_mask, other=0.0)

    # Rows past the chunk see the same positions as its last token, because a row that sees none
    # would divide by zero.
    row_position = tl.minimum(seq_len - query_len + index, tile_end - 1)
    if sharing is not None:
        row_position = tl.zeros([ROWS], tl.int32) + (tile_end - 1)
    # The maximum is finite, but below any score: a row may see no position of its first tile or
    # split.
    row_max = tl.full([ROWS], -1e30, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    if sinks is not None and partial_out is None:
        # A sink is like a position that every row sees, with a value of zero.
        row_max = tl.load(sinks + head, mask=row < TOKENS * G, other=0.0) * 1.4426950408889634
        row_sum = tl.full([ROWS], 1.0, tl.float32)
    block_table = block_tables + table * table_stride
    masked_from = start
    if window is None:  # masks are needed only after the tiles that all rows see
        masked_from = (seq_len - query_len + first + 1) // POSITIONS * POSITIONS
        if sharing is not None:
            masked_from = seq_len
        if partial_out is not None:
            masked_from = tl.maximum(tl.minimum(masked_from, end // POSITIONS * POSITIONS), start)
    acc, row_max, row_sum = attend_positions(
        q,
        q_rest,
        row_max,
        row_sum,
        row_position,
        kv_head,
        value_part,
        key_cache,
        value_cache,
        key_scales,
        value_scales,
        block_table,
        start,
        masked_from,
        tl.maximum(begin, start),
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
        DIMS // VALUE_PARTS,
        POSITIONS,
        NUM_STAGES,
    )

    attended = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    out_dim = value_part * (DIMS // VALUE_PARTS) + tl.arange(0, DIMS // VALUE_PARTS)
    is_row = (row < TOKENS * G) & (index < query_len)
    out_mask = is_row[:, None] & (out_dim < D)[None, :]
    if partial_out is None:
        out_row = out + (token * H + head) * D
        attended = attended.to(out.dtype.element_ty)
        tl.store(out_row[:, None] + out_dim[None, :], attended, mask=out_mask)
    else:
        partial = (token * N + split) * H + head
        partial_row = partial_out + partial * D
        tl.store(partial_row[:, None] + out_dim[None, :], attended, mask=out_mask)
        tl.store(partial_lse + partial, row_max + tl.log2(row_sum), mask=is_row)


@triton.jit(
    do_not_specialize=["num_seqs", "N"],
    do_not_specialize_on_alignment=["query_start_loc"],
)
def _merge_chunks_kernel(
    partial_out,  # fp32 [T, N, H, D], contiguous
    partial_lse,  # fp32 [T, N, H], contiguous, base 2
    query_start_loc,  # int32[S + 1]
    sinks,  # fp32 [H], or None
    out,  # [T, H, D], contiguous
    num_seqs,
    N,
    H: tl.constexpr,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    PARTS: tl.constexpr,  # power of two, at least N
    PART_TILE: tl.constexpr,  # splits that are added at once
):
    """Merge the splits of each token's positions, with one program for each token and head."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    if token < tl.load(query_start_loc) or token >= tl.load(query_start_loc + num_seqs):
        return
    sink = float("-inf")
    if sinks is not None:
        sink = tl.load(sinks + head) * 1.4426950408889634  # to base 2
    place = token.to(tl.int64) * N * H + head
    merged = merge_parts(partial_out, partial_lse, place, N, sink, H, D, DIMS, PARTS, PART_TILE)
    dim = tl.arange(0, DIMS)
    out_row = out + (token.to(tl.int64) * H + head) * D + dim
    tl.store(out_row, merged.to(out.dtype.element_ty), mask=dim < D)


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
    """Let each query token attend to the tokens of its sequence up to itself; return [T, H, D].

    `query` is [T, H, D + REST]. The rows [query_start_loc[s], query_start_loc[s + 1]) of `query`
    are the last tokens of sequence s. The keys and values of these tokens are already in the
    caches, which are as in `paged_attention_decode`. `block_tables` is int32[S, M], `seq_lens`
    int32[S], and `query_start_loc` int32[S + 1]. The first number of `query_start_loc` may be above
    0. The host does not read these three tensors.

    Without `out`, rows of the result that belong to no sequence, or to a sequence of length 0, are
    zeros. A sequence's result does not depend on the contents of other sequences, but its last bits
    depend on T, the number of rows of `query`: if T tokens are too few to fill the device, the
    positions that the tokens see are split. Splitting needs T * N * H * (D + 1) fp32 numbers of
    scratch memory, where N falls as T grows.

    `window`, `softcap`, `sinks` and the scales are as in `paged_attention_decode`. With `window`,
    a program reads only positions that are in the window of at least one of its query tokens.

    With `out`, contiguous [T, H, D], the result is written to `out`, and `out` is returned. Rows of
    `out` that belong to no sequence, or to a sequence of length 0, are undefined.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit, `max_query_len` exceeds T, or
            `window` or `softcap` is not positive.
    """
    if out is None:
        out = query.new_zeros((*query.shape[:2], value_cache.shape[3]))
    out = attention_out(out, query, value_cache.shape[3])
    if max_query_len > len(query):
        raise ValueError(f"max_query_len is {max_query_len}; it must be at most {len(query)}")
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
    is_whole: bool = False,
) -> Callable[[Sequences], None]:
    """Check the arguments of `paged_attention_prefill`; return a function that runs the kernels.

    The function takes the sequences of a step, and can be called for many steps. A launch
    overwrites the rows of `out` that belong to sequences whose length is not 0.

    With `is_whole`, positions are never split, so no bit of a result depends on T. With `is_whole`,
    the compiler also does not fuse products and sums, so no bit depends on how a sequence was cut
    into chunks. Without `is_whole`, the compiler might fuse products and sums in tiles of positions
    that need no mask, but not in tiles that need a mask. Which tiles need a mask depends on how the
    sequence was cut, so the last bits would depend on it, too.

    Raises:
        ValueError: an argument does not fit, as in `paged_attention_prefill`.
    """
    tiles = _prepare_tiles(
        query, key_cache, value_cache, scale, window, softcap, sinks, key_scales, value_scales, out,
        is_whole=is_whole,
    )  # fmt: skip
    num_tokens, num_heads, head_dim = out.shape
    names = ("sinks", "out", "H", "D", "DIMS")
    merge = Launch(
        _merge_chunks_kernel,
        {name: tiles.arguments[name] for name in names} | {"PARTS": MAX_SPLITS, "PART_TILE": 16},
        {},
    )

    def launch(sequences: Sequences) -> None:
        num_seqs, num_blocks = sequences.block_tables.shape
        most_visible = num_blocks * key_cache.shape[1]
        if window is not None:
            most_visible = min(most_visible, window + tiles.tokens + tiles.positions)
        num_splits = tiles.num_splits(most_visible)
        partials: dict[str, Any] = {"partial_out": None, "partial_lse": None, "N": num_splits}
        if num_splits > 1:
            partials["partial_out"] = sequences.room(num_tokens, num_splits, num_heads, head_dim)
            partials["partial_lse"] = sequences.room(num_tokens, num_splits, num_heads)
        starts = {"query_start_loc": sequences.query_start_loc, "num_seqs": num_seqs}
        tiles.attend(
            (num_tokens // tiles.tokens + num_seqs, tiles.num_kv_heads, num_splits),
            num_splits > 1,
            block_tables=sequences.block_tables,
            seq_lens=sequences.seq_lens,
            sharing=None,
            table_stride=sequences.block_tables.stride(0),
            **starts,
            **partials,
        )
        if num_splits > 1:
            merge((num_tokens, num_heads, 1), None, **starts, **partials)

    return launch


class SharedLaunch(Protocol):
    """A launch that attends to the positions that sequences share."""

    def __call__(
        self, sequences: Sequences, partial_out: torch.Tensor, partial_lse: torch.Tensor
    ) -> None:
        """Write partial results for the positions that sequences share.

        Each sequence has N partial results. The first of them are written here; `prepare_shared`
        returns how many these are. `partial_out` is fp32 [S, N, H, D], and `partial_lse`, to base
        2, is fp32 [S, N, H]; both are contiguous.
        """


def prepare_shared(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
    *,
    softcap: float | None,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    out: torch.Tensor,
) -> tuple[int, SharedLaunch]:
    """Prepare decode attention to the positions that sequences share (`SharedPrefixes`).

    Returns the number of partial results that the launch writes for each sequence, and the launch.
    """
    tiles = _prepare_tiles(
        query, key_cache, value_cache, scale, None, softcap, None, key_scales, value_scales, out
    )
    num_splits = tiles.num_splits(None)

    def launch(sequences: Sequences, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> None:
        shared = sequences.shared
        assert shared is not None, "sequences share"
        num_seqs, num_parts = partial_lse.shape[:2]
        tiles.attend(
            (num_seqs // tiles.tokens + MAX_SHARED, tiles.num_kv_heads, num_splits),
            None,
            block_tables=sequences.block_tables,
            seq_lens=shared.lens,
            query_start_loc=shared.starts,
            sharing=shared.seqs,
            table_stride=sequences.block_tables.stride(0),
            num_seqs=MAX_SHARED,
            partial_out=partial_out,
            partial_lse=partial_lse,
            N=num_parts,
        )

    return num_splits, launch


@dataclass(frozen=True, slots=True, eq=False)
class _Tiles:
    """`_attend_chunks_kernel` with its fixed arguments, and the numbers that size its grid."""

    attend: Launch
    arguments: dict[str, Any]
    tokens: int
    """Query tokens per tile."""
    positions: int
    """KV positions per tile."""
    num_kv_heads: int
    """Number of kv heads, times the number of parts into which values are divided."""
    most_splits: int
    """The limit on splits of a tile's positions."""
    least: int
    """The least number of positions of a split."""

    def num_splits(self, most_visible: int | None) -> int:
        """Return how many splits a tile has if it sees at most `most_visible` positions.

        None means that this limit is not known.
        """
        if most_visible is None:
            return max(1, self.most_splits)
        return max(1, min(self.most_splits, most_visible // self.least))


def _prepare_tiles(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    out: torch.Tensor,
    *,
    is_whole: bool = False,
) -> _Tiles:
    check_attended(query, key_cache, value_cache, key_scales, value_scales)
    check_options(query, window, softcap, sinks)
    num_tokens, num_heads = out.shape[:2]
    shape = shape_of(query, value_cache)
    config = config_of(PrefillConfig, query.device, shape)
    heads = group_heads(num_heads, config.rows, key_cache, value_cache, key_scales, value_scales)
    num_kv_heads = heads.key_cache.shape[2]
    rows = max(config.rows, triton.next_power_of_2(heads.group))
    tokens = rows // heads.group
    least = max(_LEAST_POSITIONS, config.positions)
    arguments = attend_arguments(query, heads, out, config, scale, window, softcap, sinks)
    sizes = {"G": heads.group, "ROWS": rows, "TOKENS": tokens, "LEAST_POSITIONS": least}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if is_whole:
        options["enable_fp_fusion"] = False
    # The sums of wider values do not fit into a program's registers; those of latents barely fit.
    is_wide = shape.divides_values and shape.dims > config.value_dims
    sizes["VALUE_PARTS"] = shape.dims // config.value_dims if is_wide else 1
    num_kv_heads *= sizes["VALUE_PARTS"]
    num_programs = triton.cdiv(num_tokens, tokens) * num_kv_heads
    return _Tiles(
        Launch(_attend_chunks_kernel, arguments | sizes, options),
        arguments,
        tokens,
        config.positions,
        num_kv_heads,
        1 if is_whole else min(num_processors(query.device) // max(1, num_programs), MAX_SPLITS),
        least,
    )
