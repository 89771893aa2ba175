"""Draws one token from each row of logits, without sorting the row.

Symbols: `S` sequences, `V` vocabulary, `C` tiles of a row.

The candidates of a row are the tokens that top-k or top-p may keep (`candidates.py`). Each token
has an integer key: the likelier the token, the lower the key (`keys_of`). The weight of a token or
key is the token's probability, divided by that of the likeliest token (`weight_of`).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202  Triton infers the types inside kernels

from typing import Final

import torch
import triton
import triton.language as tl

from kernels.checks import check_tensor
from kernels.triton.candidates import BINS, TOKENS, bin_of, gather_candidates, keys_of, weight_of

_NUM_WARPS: Final = 16  # many, because one program may read a whole row several times


@triton.jit
def _load_keys(row, first, V, TOKENS: tl.constexpr):
    """Return a tile of the keys in `row`; past the `V` keys, return the largest int32."""
    token = first + tl.arange(0, TOKENS)
    return tl.load(row + token, mask=token < V, other=0x7FFFFFFF)


@triton.jit
def _threshold(row, goal, high, V, IS_WEIGHT: tl.constexpr, TOKENS: tl.constexpr):
    """Return the least key at which the running sum reaches `goal`, and the sum before this key.

    The sum runs over the row's keys in ascending order. A key adds its weight, or 1 if `IS_WEIGHT`
    is false. If the sum does not reach the goal at any key below `high`, `high` is returned.

    Three pivots divide the range of keys into quarters, and a pass over the row computes the
    running sum at each pivot. The quarter in which the sum reaches the goal is the range of the
    next pass, narrowed to keys that occur in the row. The passes end when the range has one key.
    Each lane of a tile adds up its own keys, so threads wait for each other only once in a pass.
    """
    AMOUNT: tl.constexpr = tl.float64 if IS_WEIGHT else tl.int32
    low = tl.full([], -1, tl.int32)  # keys in (low, high] are left; those up to low are `below`
    below = tl.full([], 0, AMOUNT)
    while high - low > 1:
        quarter = (high - low) // 4
        pivot_1 = low + tl.maximum(quarter, 1)
        pivot_2 = tl.minimum(pivot_1 + quarter, high - 1)
        pivot_3 = tl.minimum(pivot_2 + quarter, high - 1)
        sums_1 = tl.full([TOKENS], 0, AMOUNT)
        sums_2 = tl.full([TOKENS], 0, AMOUNT)
        sums_3 = tl.full([TOKENS], 0, AMOUNT)
        lasts_1 = tl.full([TOKENS], -1, tl.int32)  # the last key up to the pivot
        lasts_2 = tl.full([TOKENS], -1, tl.int32)
        lasts_3 = tl.full([TOKENS], -1, tl.int32)
        nexts_1 = tl.full([TOKENS], 0x7FFFFFFF, tl.int32)  # the first key past the pivot
        nexts_2 = tl.full([TOKENS], 0x7FFFFFFF, tl.int32)
        nexts_3 = tl.full([TOKENS], 0x7FFFFFFF, tl.int32)
        for first in range(0, V, TOKENS):
            key = _load_keys(row, first, V, TOKENS)
            amount = tl.full([TOKENS], 1, AMOUNT)
            if IS_WEIGHT:
                amount = weight_of(key).to(tl.float64)
            sums_1 += tl.where(key <= pivot_1, amount, 0)
            sums_2 += tl.where(key <= pivot_2, amount, 0)
            sums_3 += tl.where(key <= pivot_3, amount, 0)
            lasts_1 = tl.maximum(lasts_1, tl.where(key <= pivot_1, key, -1))
            lasts_2 = tl.maximum(lasts_2, tl.where(key <= pivot_2, key, -1))
            lasts_3 = tl.maximum(lasts_3, tl.where(key <= pivot_3, key, -1))
            nexts_1 = tl.minimum(nexts_1, tl.where(key <= pivot_1, 0x7FFFFFFF, key))
            nexts_2 = tl.minimum(nexts_2, tl.where(key <= pivot_2, 0x7FFFFFFF, key))
            nexts_3 = tl.minimum(nexts_3, tl.where(key <= pivot_3, 0x7FFFFFFF, key))
        sum_1 = tl.sum(sums_1, axis=0)
        sum_2 = tl.sum(sums_2, axis=0)
        sum_3 = tl.sum(sums_3, axis=0)
        if sum_1 >= goal:
            high = tl.max(lasts_1, axis=0)
        elif sum_2 >= goal:
            high, low, below = tl.max(lasts_2, axis=0), tl.min(nexts_1, axis=0) - 1, sum_1
        elif sum_3 >= goal:
            high, low, below = tl.max(lasts_3, axis=0), tl.min(nexts_2, axis=0) - 1, sum_2
        else:  # also if a sum is NaN, so that the range shrinks in any case
            low, below = tl.minimum(tl.min(nexts_3, axis=0), high) - 1, sum_3
    return high, below


@triton.jit
def _end_of_equals(row, threshold, num_equal, V, TOKENS: tl.constexpr):
    """Return 1 + the index of the `num_equal`-th key that equals the threshold.

    If the row has at most `num_equal` such keys, return V. One pass over the row counts these keys.
    Only if there are more, a second, slower pass looks for the index: in this pass, threads wait
    for each other after each tile.
    """
    counts = tl.full([TOKENS], 0, tl.int32)
    for first in range(0, V, TOKENS):
        counts += (_load_keys(row, first, V, TOKENS) == threshold).to(tl.int32)
    end = V + tl.full([], 0, tl.int32)
    if tl.sum(counts, axis=0) > num_equal:
        left = num_equal
        first = tl.full([], 0, tl.int32)
        end = tl.full([], 0, tl.int32)
        while (left > 0) & (first < V):
            is_equal = (_load_keys(row, first, V, TOKENS) == threshold).to(tl.int32)
            num_here = tl.sum(is_equal, axis=0)
            if num_here >= left:
                token = first + tl.arange(0, TOKENS)
                is_last = (is_equal > 0) & (tl.cumsum(is_equal, axis=0) == left)
                end = tl.max(tl.where(is_last, token + 1, 0), axis=0)
            left -= num_here
            first += TOKENS
    return end


@triton.jit
def _kept(row, first, threshold, equals_end, floor, V, TOKENS: tl.constexpr):
    """Return the fp64 weights of a tile's keys; a key that is cut off has the weight 0.

    A key is kept if it is below `threshold`, or equals `threshold` and its index is below
    `equals_end` (`_end_of_equals`). Also, its weight must be at least `floor`.
    """
    key = _load_keys(row, first, V, TOKENS)
    token = first + tl.arange(0, TOKENS)
    weight = weight_of(key)
    is_kept = (key < threshold) | ((key == threshold) & (token < equals_end))
    return tl.where(is_kept & (weight >= floor), weight, 0.0).to(tl.float64)


@triton.jit
def _uniform(seed, position):
    """Return the (position + 1)-th output of SplitMix64 with this seed, as fp64 in [0, 1)."""
    x = seed.to(tl.uint64, bitcast=True)
    x += (position + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    # 53 bits are left, so the conversion to fp64 can go through int64.
    return ((x ^ (x >> 31)) >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _draw_cut(row, size, total, k, is_top_k, p, floor, uniform, TOKENS: tl.constexpr):
    """Draw a candidate from a row with top_k or top_p, as `_sample_kernel` says; return its index.

    `row` has `size` keys, those of the candidates. `total` is the sum of the weights of all tokens,
    not only of the candidates.
    """
    threshold = tl.full([], 0x7F800000, tl.int32)  # the key of minus infinity
    num_equal = tl.full([], 0x7FFFFFFF, tl.int32)
    equals_end = size + tl.full([], 0, tl.int32)
    if is_top_k:
        threshold, num_below = _threshold(row, k.to(tl.int32), threshold, size, False, TOKENS)
        num_equal = k.to(tl.int32) - num_below
        equals_end = _end_of_equals(row, threshold, num_equal, size, TOKENS)
    if p < 1:
        if is_top_k:
            sums = tl.full([TOKENS], 0.0, tl.float64)
            for first in range(0, size, TOKENS):
                sums += _kept(row, first, threshold, equals_end, 0.0, size, TOKENS)
            total = tl.sum(sums, axis=0)
        goal = p * total
        least, below = _threshold(row, goal, threshold, size, True, TOKENS)
        each = weight_of(least).to(tl.float64)
        needed = tl.where(each > 0, tl.ceil((goal - below) / tl.where(each > 0, each, 1.0)), 1.0)
        most = tl.where(least == threshold, num_equal, 0x7FFFFFFF)
        needed = tl.minimum(tl.maximum(needed, 1.0), 1073741824.0).to(tl.int32)
        threshold = least
        equals_end = _end_of_equals(row, threshold, tl.minimum(needed, most), size, TOKENS)

    sums = tl.full([TOKENS], 0.0, tl.float64)
    lasts = tl.full([TOKENS], 0, tl.int32)
    for first in range(0, size, TOKENS):
        weight = _kept(row, first, threshold, equals_end, floor, size, TOKENS)
        sums += weight
        lasts = tl.maximum(lasts, tl.where(weight > 0, first + tl.arange(0, TOKENS), 0))
    target = uniform * tl.sum(sums, axis=0)
    chosen = tl.max(lasts, axis=0)  # the last token with any weight, if rounding leads past it

    running = tl.full([], 0.0, tl.float64)
    first = tl.full([], 0, tl.int32)
    while first < size:
        weight = _kept(row, first, threshold, equals_end, floor, size, TOKENS)
        after = running + tl.sum(weight, axis=0)
        if after > target:
            chosen = _first_past(weight, first + tl.arange(0, TOKENS), running, target)
            first = size + tl.full([], 0, tl.int32)
        running = after
        first += TOKENS
    return chosen


@triton.jit
def _first_past(weight, token, before, target):
    """Return the first token at which the running sum of weights exceeds `target`.

    The sum starts from `before`. If the sum never exceeds `target`, because of rounding, the
    result is the last token whose weight is above 0.
    """
    is_past = (before + tl.cumsum(weight, axis=0) > target) & (weight > 0)
    last = tl.max(tl.where(weight > 0, token, 0), axis=0)
    return tl.minimum(tl.min(tl.where(is_past, token, 0x7FFFFFFF), axis=0), last)


@triton.jit(
    do_not_specialize=["V", "num_tiles"],
    do_not_specialize_on_alignment=[
        *("maxima", "temperature", "top_k", "top_p", "min_p", "seeds", "positions", "lasts", "out")
    ],
)
def _sample_kernel(
    logits,  # fp32 [S, V]
    maxima,  # fp32 [S]
    temperature,  # fp32 [S]
    keys,  # int32 [S, C * TOKENS], these four by `gather_candidates`
    sums,  # fp64 [S, C]
    lasts,  # int32[S]
    ends,  # int32 [S, C]
    top_k,  # int64[S]
    top_p,  # fp64[S]
    min_p,  # fp32[S]
    seeds,  # int64[S]
    positions,  # int64[S]
    out,  # int64[S]
    logits_stride,
    V,
    num_tiles,  # C
    TOKENS: tl.constexpr,
    BINS: tl.constexpr,
    TILES: tl.constexpr,  # a power of two, at least C
):
    """`out[s]` is the first token at which the running sum of kept weights exceeds u * their sum.

    u is the row's uniform number (`_uniform`). There is one program for each row. Sums are fp64, in
    a fixed order. After top_k and top_p, min_p drops the tokens whose weight is below `min_p`.

    In a row with top_k or top_p, the kept tokens are those with keys below a threshold, and the
    first few of those whose key equals the threshold. top_k finds its threshold by counting tokens,
    and top_p by adding up weights. The program reads only the keys of the candidates, until a
    candidate is drawn. Then the program reads one tile of logits, to find the token of this
    candidate.

    In a row with neither top_k nor top_p, the sums of the tiles say which tile has the drawn token,
    and the program reads only this tile.
    """
    seq = tl.program_id(0).to(tl.int64)
    k = tl.load(top_k + seq)
    p = tl.load(top_p + seq)
    floor = tl.load(min_p + seq)
    uniform = _uniform(tl.load(seeds + seq), tl.load(positions + seq))
    tile = tl.arange(0, TILES)
    is_tile = tile < num_tiles
    in_tile = tl.load(sums + seq * num_tiles + tile, mask=is_tile, other=0.0)
    total = tl.sum(in_tile, axis=0)
    if (k < V) | (p < 1):
        row = keys + seq * num_tiles * TOKENS
        size = tl.load(ends + seq * num_tiles + num_tiles - 1)
        nth = _draw_cut(row, size, total, k, k < V, p, floor, uniform, TOKENS)
        end = tl.load(ends + seq * num_tiles + tile, mask=is_tile, other=0x7FFFFFFF)
        num_before = tl.max(tl.where(end <= nth, end, 0), axis=0)
        token = tl.sum((end <= nth).to(tl.int32), axis=0) * TOKENS + tl.arange(0, TOKENS)
        key = keys_of(logits, maxima, temperature, seq, token, logits_stride, V)
        is_in = (bin_of(key, BINS) <= tl.load(lasts + seq)).to(tl.int32)
        is_nth = (is_in > 0) & (num_before + tl.cumsum(is_in, axis=0) == nth + 1)
        chosen = tl.max(tl.where(is_nth & (token < V), token, 0), axis=0)
    else:
        target = uniform * total
        own = _first_past(in_tile, tile, 0.0, target)
        before = tl.sum(tl.where(tile < own, in_tile, 0.0), axis=0)
        token = own * TOKENS + tl.arange(0, TOKENS)
        key = keys_of(logits, maxima, temperature, seq, token, logits_stride, V)
        weight = weight_of(key)
        weight = tl.where(weight >= floor, weight, 0.0).to(tl.float64)
        chosen = _first_past(weight, token, before, target)
    tl.store(out + seq, chosen.to(tl.int64))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Draw a token from each row of `logits`, fp32[S, V]; return the token ids, int64[S].

    Parameters and result are as `kernels.reference.sample` says. But fp64 sums are added in another
    order, and the device's exponential is exact only up to the last bits of fp32. So a token may
    differ from that of `kernels.reference.sample` if the uniform number, or p, is within about 1e-7
    of a number at which the result changes. The stride of `logits` over S may be any.

    No row is sorted. In a row with top_k or top_p, the logits are read three times: to find their
    maximum, to count the tokens by their distance from the maximum, and to gather the candidates.
    Each tile has its own program, which gathers the tile's candidates. Then about ten passes over
    the candidates find the thresholds at which top_k and top_p cut off tokens. If most tokens are
    candidates, each of these passes reads about as much as a pass over the row. A row with neither
    top_k nor top_p is read twice.

    The op needs about S * V * 9 / 8 int32 numbers of scratch memory. The host reads nothing from
    the device, and a row's token does not depend on other rows.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    num_seqs, num_tokens = logits.shape
    check_tensor("logits", logits, (num_seqs, num_tokens), torch.float32, logits)
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int64),
        ("top_p", top_p, torch.float64),
        ("min_p", min_p, torch.float32),
        ("seeds", seeds, torch.int64),
        ("positions", positions, torch.int64),
    ):
        check_tensor(name, tensor, (num_seqs,), dtype, logits)
    out = torch.empty(num_seqs, dtype=torch.int64, device=logits.device)
    num_tiles = triton.cdiv(num_tokens, TOKENS)
    given = logits, logits.amax(1), temperature
    candidates = gather_candidates(*given, top_k, top_p, min_p)
    _sample_kernel[(num_seqs,)](
        *(*given, *candidates, top_k, top_p, min_p, seeds, positions, out),
        *(logits.stride(0), num_tokens, num_tiles),
        TOKENS=TOKENS,
        BINS=BINS,
        TILES=triton.next_power_of_2(num_tiles),
        num_warps=_NUM_WARPS,
    )
    return out
