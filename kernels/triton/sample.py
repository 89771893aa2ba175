"""Draws one token from each row of logits, without sorting them.

Symbols: `S` sequences, `V` vocabulary, `C` tokens of a tile.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202  Triton infers the types inside kernels
# ruff: noqa: PLR2004  nor do kernels see constants of the module, here the ends of int32 and fp32

from typing import Final

import torch
import triton
import triton.language as tl

from kernels.checks import check_tensor

_TOKENS: Final = 4096  # of a tile
_NUM_WARPS: Final = 16  # one program reads a whole row, many times


@triton.jit(
    do_not_specialize_on_alignment=["maxima", "temperature"],
)
def _scale_kernel(
    logits,  # fp32 [S, V]
    maxima,  # fp32 [S]
    temperature,  # fp32 [S]
    keys,  # int32 [S, V], contiguous
    logits_stride,
    V,
    TOKENS: tl.constexpr,
):
    """`keys[s, v]` is the bits of `(max - logits[s, v]) / temperature`; the likeliest token has 0.

    Bits of floats that are not negative are ordered as the floats are, so keys can be compared. One
    program for each row and TOKENS tokens.
    """
    seq = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    logit = tl.load(logits + seq * logits_stride + token, mask=token < V)
    largest = tl.maximum(tl.load(maxima + seq), -3.4028234663852886e38)
    gap = tl.div_rn(largest - logit, tl.load(temperature + seq) + tl.zeros_like(logit))
    # A logit is above the maximum only in a row with NaN, whose token does not matter.
    tl.store(keys + seq * V + token, tl.abs(gap).to(tl.int32, bitcast=True), mask=token < V)


@triton.jit
def _load_keys(row, first, V, TOKENS: tl.constexpr):
    """Return the keys of a tile; past the vocabulary, keys above any threshold."""
    token = first + tl.arange(0, TOKENS)
    return tl.load(row + token, mask=token < V, other=0x7FFFFFFF)


@triton.jit
def _weight_of(key):
    """Return fp32 exp(-gap); 0 for logits of minus infinity and past the vocabulary."""
    finite = key < 0x7F800000
    weight = tl.exp(-tl.where(finite, key, 0).to(tl.float32, bitcast=True))
    return tl.where(finite, weight, 0.0)


@triton.jit
def _threshold(row, goal, high, V, IS_WEIGHT: tl.constexpr, TOKENS: tl.constexpr):
    """Return the least key such that the keys up to it add up to `goal`, and the sum below it.

    Each key adds its weight, or 1. The result is at most `high`, which is returned if no smaller
    key reaches the goal. Each pass over the row adds up to three pivots and keeps a quarter of the
    range of keys, cut to keys that occur, until one key is left.
    """
    low = tl.full([], -1, tl.int32)  # keys in (low, high] are left; those up to low are `below`
    below = tl.full([], 0.0, tl.float64)
    while high - low > 1:
        quarter = (high - low) // 4
        pivot_1 = low + tl.maximum(quarter, 1)
        pivot_2 = tl.minimum(pivot_1 + quarter, high - 1)
        pivot_3 = tl.minimum(pivot_2 + quarter, high - 1)
        sum_1 = tl.full([], 0.0, tl.float64)
        sum_2 = tl.full([], 0.0, tl.float64)
        sum_3 = tl.full([], 0.0, tl.float64)
        last_1 = tl.full([], -1, tl.int32)  # the last key up to the pivot
        last_2 = tl.full([], -1, tl.int32)
        last_3 = tl.full([], -1, tl.int32)
        next_1 = tl.full([], 0x7FFFFFFF, tl.int32)  # the first key past the pivot
        next_2 = tl.full([], 0x7FFFFFFF, tl.int32)
        next_3 = tl.full([], 0x7FFFFFFF, tl.int32)
        for first in range(0, V, TOKENS):
            key = _load_keys(row, first, V, TOKENS)
            amount = tl.full([TOKENS], 1.0, tl.float64)
            if IS_WEIGHT:
                amount = _weight_of(key).to(tl.float64)
            sum_1 += tl.sum(tl.where(key <= pivot_1, amount, 0.0), axis=0)
            sum_2 += tl.sum(tl.where(key <= pivot_2, amount, 0.0), axis=0)
            sum_3 += tl.sum(tl.where(key <= pivot_3, amount, 0.0), axis=0)
            last_1 = tl.maximum(last_1, tl.max(tl.where(key <= pivot_1, key, -1), axis=0))
            last_2 = tl.maximum(last_2, tl.max(tl.where(key <= pivot_2, key, -1), axis=0))
            last_3 = tl.maximum(last_3, tl.max(tl.where(key <= pivot_3, key, -1), axis=0))
            next_1 = tl.minimum(next_1, tl.min(tl.where(key <= pivot_1, 0x7FFFFFFF, key), axis=0))
            next_2 = tl.minimum(next_2, tl.min(tl.where(key <= pivot_2, 0x7FFFFFFF, key), axis=0))
            next_3 = tl.minimum(next_3, tl.min(tl.where(key <= pivot_3, 0x7FFFFFFF, key), axis=0))
        if sum_1 >= goal:
            high = last_1
        elif sum_2 >= goal:
            high, low, below = last_2, next_1 - 1, sum_1
        elif sum_3 >= goal:
            high, low, below = last_3, next_2 - 1, sum_2
        else:  # also if a sum is NaN: the range shrinks all the same
            low, below = tl.minimum(next_3, high) - 1, sum_3
    return high, below


@triton.jit
def _kept(row, first, threshold, num_equal, equals_before, floor, V, TOKENS: tl.constexpr):
    """Return a tile's fp64 weights, 0 if dropped, and how many keys equal the threshold."""
    key = _load_keys(row, first, V, TOKENS)
    is_equal = (key == threshold).to(tl.int32)
    rank = equals_before + tl.cumsum(is_equal, axis=0)
    weight = _weight_of(key)
    is_kept = (key < threshold) | ((key == threshold) & (rank <= num_equal))
    weight = tl.where(is_kept & (weight >= floor), weight, 0.0)
    return weight.to(tl.float64), tl.sum(is_equal, axis=0)


@triton.jit
def _uniform(seed, position):
    """Return fp64 in [0, 1): the (position + 1)-th output of SplitMix64 that starts at `seed`."""
    x = seed.to(tl.uint64, bitcast=True)
    x += (position + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    # Converted to fp64 through int64, because 53 bits are left.
    return ((x ^ (x >> 31)) >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit(
    do_not_specialize=["V"],
    do_not_specialize_on_alignment=["top_k", "top_p", "min_p", "seeds", "positions", "out"],
)
def _sample_kernel(
    keys,  # int32 [S, V], contiguous, by `_scale_kernel`
    top_k,  # int64[S]
    top_p,  # fp64[S]
    min_p,  # fp32[S]
    seeds,  # int64[S]
    positions,  # int64[S]
    out,  # int64[S]
    V,
    TOKENS: tl.constexpr,
):
    """`out[s]` is the first token at which the running sum of kept weights exceeds u of their sum.

    u is the row's uniform number. Kept are the tokens whose keys are below a threshold, and the
    first `num_equal` whose keys equal it. The threshold is found for top_k by counting, then for
    top_p by weight; min_p drops weights below a floor. One program for each row; sums are fp64, in
    a fixed order.
    """
    seq = tl.program_id(0).to(tl.int64)
    row = keys + seq * V
    k = tl.load(top_k + seq)
    p = tl.load(top_p + seq)
    floor = tl.load(min_p + seq)
    threshold = tl.full([], 0x7F800000, tl.int32)  # the key of minus infinity
    num_equal = tl.full([], 0x7FFFFFFF, tl.int32)
    if k < V:
        threshold, below = _threshold(row, k.to(tl.float64), threshold, V, False, TOKENS)
        num_equal = (k - below.to(tl.int64)).to(tl.int32)
    if p < 1:
        total = tl.full([], 0.0, tl.float64)
        equals = tl.full([], 0, tl.int32)
        for first in range(0, V, TOKENS):
            weight, more = _kept(row, first, threshold, num_equal, equals, 0.0, V, TOKENS)
            total += tl.sum(weight, axis=0)
            equals += more
        goal = p * total
        least, below = _threshold(row, goal, threshold, V, True, TOKENS)
        each = _weight_of(least).to(tl.float64)
        needed = tl.where(each > 0, tl.ceil((goal - below) / tl.where(each > 0, each, 1.0)), 1.0)
        most = tl.where(least == threshold, num_equal, 0x7FFFFFFF)
        needed = tl.minimum(tl.maximum(needed, 1.0), 1073741824.0).to(tl.int32)
        num_equal = tl.minimum(needed, most)
        threshold = least

    total = tl.full([], 0.0, tl.float64)
    equals = tl.full([], 0, tl.int32)
    for first in range(0, V, TOKENS):
        weight, more = _kept(row, first, threshold, num_equal, equals, floor, V, TOKENS)
        total += tl.sum(weight, axis=0)
        equals += more
    target = _uniform(tl.load(seeds + seq), tl.load(positions + seq)) * total

    chosen = tl.full([], 0x7FFFFFFF, tl.int32)
    last = tl.full(
        [], 0, tl.int32
    )  # the last token with any weight, drawn if rounding leads past it
    running = tl.full([], 0.0, tl.float64)
    equals = tl.full([], 0, tl.int32)
    first = tl.full([], 0, tl.int32)
    while (first < V) & (chosen == 0x7FFFFFFF):
        weight, more = _kept(row, first, threshold, num_equal, equals, floor, V, TOKENS)
        token = first + tl.arange(0, TOKENS)
        is_past = (running + tl.cumsum(weight, axis=0) > target) & (weight > 0)
        chosen = tl.min(tl.where(is_past, token, 0x7FFFFFFF), axis=0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0, token, 0), axis=0))
        running += tl.sum(weight, axis=0)
        equals += more
        first += TOKENS
    chosen = tl.where(chosen == 0x7FFFFFFF, last, chosen)
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
    """Draw a token of each row of `logits` [S, V], fp32, of any stride over S; int64[S].

    Parameters, cuts, ties and the draw are as `kernels.reference.sample` says. But fp64 sums are
    added in another order, and the device's exponential is exact only up to the last bits of fp32.
    So a token may differ from the twin's if a uniform number, or p, is within about 1e-7 of the
    border between two tokens.

    No row is sorted: thresholds are found in about ten passes over a row, which a program reads
        from cache. Needs int32 scratch of S * V. The host reads nothing from the device, and a row
        does not depend on other rows.

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
    keys = torch.empty((num_seqs, num_tokens), dtype=torch.int32, device=logits.device)
    out = torch.empty(num_seqs, dtype=torch.int64, device=logits.device)
    _scale_kernel[(num_seqs, triton.cdiv(num_tokens, _TOKENS))](
        logits,
        logits.amax(1),
        temperature,
        keys,
        logits.stride(0),
        num_tokens,
        TOKENS=_TOKENS,
    )
    _sample_kernel[(num_seqs,)](
        keys,
        top_k,
        top_p,
        min_p,
        seeds,
        positions,
        out,
        num_tokens,
        TOKENS=_TOKENS,
        num_warps=_NUM_WARPS,
    )
    return out
