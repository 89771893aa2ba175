"""Gathers the candidates of each row of logits: the tokens that top-k or top-p may keep.

Symbols: `S` sequences, `V` vocabulary, `C` tiles of a row.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202  Triton infers the types inside kernels
# ruff: noqa: PLR2004  kernels cannot read the module's constants, here the limits of int32 and fp32

from functools import partial
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

TOKENS: Final = 2048  # tokens per tile; with more, the sums of lanes would not fit into registers
BINS: Final = 256  # of gaps (`keys_of`) up to 32; weights beyond are below 2e-14
_CHUNK: Final = 64  # tiles whose counts the program of a row reads at once; more would not fit
_NUM_WARPS: Final = 16  # of that program


@triton.jit
def keys_of(logits, maxima, temperature, seq, token, logits_stride, V):
    """Return the key of each token: the bits of its *gap*, `(max - logits[s, v]) / temperature`.

    The likeliest token has the key 0. The bits of floats that are not negative are ordered like the
    floats, so keys can be compared. Past V, keys are the largest int32.
    """
    logit = tl.load(logits + seq * logits_stride + token, mask=token < V, other=0.0)
    largest = tl.maximum(tl.load(maxima + seq), -3.4028234663852886e38)
    gap = tl.div_rn(largest - logit, tl.load(temperature + seq) + tl.zeros_like(logit))
    # A logit is above the maximum only in a row with NaN, whose token does not matter.
    return tl.where(token < V, tl.abs(gap).to(tl.int32, bitcast=True), 0x7FFFFFFF)


@triton.jit
def weight_of(key):
    """Return each key's fp32 weight, exp(-gap); 0 for logits of -inf and past the vocabulary.

    `keys_of` explains gaps.
    """
    finite = key < 0x7F800000
    weight = tl.exp(-tl.where(finite, key, 0).to(tl.float32, bitcast=True))
    return tl.where(finite, weight, 0.0)


@triton.jit
def bin_of(key, BINS: tl.constexpr):
    """Return the bin of each key: 8 * gap rounded down, at most BINS - 1. Bins ascend with keys.

    `keys_of` explains gaps.
    """
    is_finite = key < 0x7F800000
    gap = tl.where(is_finite, key, 0).to(tl.float32, bitcast=True)
    return tl.where(is_finite, tl.minimum(gap * 8.0, BINS - 1.0).to(tl.int32), BINS - 1)


@triton.jit(
    do_not_specialize=["num_tiles"],
    do_not_specialize_on_alignment=["maxima", "temperature", "top_k", "top_p", "min_p"],
)
def _count_kernel(
    logits,  # fp32 [S, V]
    maxima,  # fp32 [S]
    temperature,  # fp32 [S]
    top_k,  # int64[S]
    top_p,  # fp64[S]
    min_p,  # fp32[S]
    counts,  # int32 [S, C, BINS]
    sums,  # fp64 [S, C]
    logits_stride,
    V,
    num_tiles,  # C
    TOKENS: tl.constexpr,
    BINS: tl.constexpr,
):
    """Sum the weights of each tile; in rows with top_k or top_p, count the tile's tokens by bin.

    In other rows, the sums leave out weights that min_p drops. Tokens past V are in the last bin.
    There is one program for each tile of TOKENS tokens of a row.
    """
    seq = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    key = keys_of(logits, maxima, temperature, seq, token, logits_stride, V)
    weight = weight_of(key)
    place = seq * num_tiles + tile
    if (tl.load(top_k + seq) < V) | (tl.load(top_p + seq) < 1):
        count = tl.histogram(bin_of(key, BINS), BINS)
        tl.store(counts + place * BINS + tl.arange(0, BINS), count)
    else:
        weight = tl.where(weight >= tl.load(min_p + seq), weight, 0.0)
    tl.store(sums + place, tl.sum(weight.to(tl.float64), axis=0))


@triton.jit(
    do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=["top_k", "top_p", "lasts"]
)
def _choose_kernel(
    counts,  # int32 [S, C, BINS], by `_count_kernel`
    sums,  # fp64 [S, C], by `_count_kernel`
    top_k,  # int64[S]
    top_p,  # fp64[S]
    lasts,  # int32[S]
    ends,  # int32 [S, C]
    V,
    num_tiles,  # C
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,  # tiles whose counts are read at once
    TILES: tl.constexpr,  # a power of two, at least C
):
    """Choose each row's last bin of candidates; count candidates up to the end of each tile.

    A row's candidates are the tokens in the bins up to the last one. With top_k, the last bin is
    the one at which the count of tokens, from the first bin on, reaches k. With top_p alone, the
    tokens after the last bin weigh at most 1 - p of the sum of the row's weights. So all tokens
    that top_k and top_p keep are candidates. There is one program for each row.
    """
    seq = tl.program_id(0).to(tl.int64)
    k = tl.load(top_k + seq)
    p = tl.load(top_p + seq)
    if (k < V) | (p < 1):
        nth = tl.arange(0, BINS)
        row = counts + seq * num_tiles * BINS
        in_bin = tl.zeros([BINS], tl.int32)
        for first in range(0, num_tiles, CHUNK):
            in_bin += tl.sum(_counts_of(row, first, num_tiles, CHUNK, BINS), axis=0)
        tile = tl.arange(0, TILES)
        is_tile = tile < num_tiles
        total = tl.sum(tl.load(sums + seq * num_tiles + tile, mask=is_tile, other=0.0), axis=0)
        most = in_bin.to(tl.float64) * tl.exp(nth.to(tl.float32) * -0.125).to(tl.float64)
        rest = tl.sum(most, axis=0) - tl.cumsum(most, axis=0)
        # Rounding errors are far below these margins.
        is_enough = rest * 1.0001 + total * 1e-12 <= (1 - p) * total
        if k < V:
            is_enough = tl.cumsum(in_bin, axis=0) >= k
        last = tl.min(tl.where(is_enough, nth, BINS - 1), axis=0)
        tl.store(lasts + seq, last)
        num_before = 0
        for first in range(0, num_tiles, CHUNK):
            count = _counts_of(row, first, num_tiles, CHUNK, BINS)
            in_tile = tl.sum(tl.where(nth[None, :] <= last, count, 0), axis=1)
            end = num_before + tl.cumsum(in_tile, axis=0)
            nth_tile = first + tl.arange(0, CHUNK)
            tl.store(ends + seq * num_tiles + nth_tile, end, mask=nth_tile < num_tiles)
            num_before += tl.sum(in_tile, axis=0)


@triton.jit
def _counts_of(row, first, num_tiles, CHUNK: tl.constexpr, BINS: tl.constexpr):
    """Return int32 [CHUNK, BINS]: a row's counts in tiles from `first` on; 0 past the last tile."""
    tile = first + tl.arange(0, CHUNK)
    place = tile[:, None] * BINS + tl.arange(0, BINS)[None, :]
    return tl.load(row + place, mask=(tile < num_tiles)[:, None], other=0)


@triton.jit(
    do_not_specialize=["num_tiles"],
    do_not_specialize_on_alignment=["maxima", "temperature", "top_k", "top_p", "lasts"],
)
def _gather_kernel(
    logits,  # fp32 [S, V]
    maxima,  # fp32 [S]
    temperature,  # fp32 [S]
    top_k,  # int64[S]
    top_p,  # fp64[S]
    lasts,  # int32[S], by `_choose_kernel`
    ends,  # int32 [S, C], by `_choose_kernel`
    keys,  # int32 [S, C * TOKENS]
    logits_stride,
    V,
    num_tiles,  # C
    TOKENS: tl.constexpr,
    BINS: tl.constexpr,
):
    """Store the keys of each row's candidates, in the order of tokens, with a program per tile."""
    seq = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    if (tl.load(top_k + seq) < V) | (tl.load(top_p + seq) < 1):
        token = tile * TOKENS + tl.arange(0, TOKENS)
        key = keys_of(logits, maxima, temperature, seq, token, logits_stride, V)
        is_in = (bin_of(key, BINS) <= tl.load(lasts + seq)).to(tl.int32)
        first = tl.load(ends + seq * num_tiles + tile) - tl.sum(is_in, axis=0)
        place = first + tl.cumsum(is_in, axis=0) - 1
        tl.store(keys + seq * num_tiles * TOKENS + place, key, mask=is_in > 0)


class Candidates(NamedTuple):
    """The candidates of all rows. The fields are in the order of `_sample_kernel`'s arguments."""

    keys: torch.Tensor
    """int32 [S, C * TOKENS]: the keys of each row's candidates, in the order of tokens."""
    sums: torch.Tensor
    """fp64 [S, C]: the sum of each tile's weights; see `_count_kernel`."""
    lasts: torch.Tensor
    """int32[S]: each row's last bin of candidates; see `_choose_kernel`."""
    ends: torch.Tensor
    """int32 [S, C]: the number of candidates up to the end of each tile."""


def gather_candidates(
    logits: torch.Tensor,
    maxima: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> Candidates:
    """Gather the candidates for `sample`. `maxima` are the rows' largest logits.

    Tokens are counted by their gap to the likeliest token, and the counts bound what top_k or top_p
    can keep. For a row with neither top_k nor top_p, only `sums` is valid.
    """
    num_seqs, num_tokens = logits.shape
    num_tiles = triton.cdiv(num_tokens, TOKENS)
    int32 = partial(torch.empty, dtype=torch.int32, device=logits.device)
    counts, keys = int32((num_seqs, num_tiles, BINS)), int32((num_seqs, num_tiles * TOKENS))
    lasts, ends = int32(num_seqs), int32((num_seqs, num_tiles))
    sums = torch.empty((num_seqs, num_tiles), dtype=torch.float64, device=logits.device)
    given = logits, maxima, temperature, top_k, top_p
    shape = logits.stride(0), num_tokens, num_tiles
    _count_kernel[(num_seqs, num_tiles)](
        *(*given, min_p, counts, sums, *shape), TOKENS=TOKENS, BINS=BINS
    )
    _choose_kernel[(num_seqs,)](
        *(counts, sums, top_k, top_p, lasts, ends, num_tokens, num_tiles),
        BINS=BINS,
        CHUNK=_CHUNK,
        TILES=triton.next_power_of_2(num_tiles),
        num_warps=_NUM_WARPS,
    )
    _gather_kernel[(num_seqs, num_tiles)](
        *(*given, lasts, ends, keys, *shape), TOKENS=TOKENS, BINS=BINS
    )
    return Candidates(keys, sums, lasts, ends)
