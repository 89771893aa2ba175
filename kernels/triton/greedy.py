"""The likeliest token of each row of logits, and whether all its logits are finite, in one pass.

Symbols: `S` sequences, `V` vocabulary, `C` tiles of a row.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202  Triton infers the types inside kernels

from typing import Final

import torch
import triton
import triton.language as tl

from kernels.checks import check_float

_TOKENS: Final = 2048  # of a tile


@triton.jit(do_not_specialize=["V", "num_tiles"])
def _tile_maxima_kernel(
    logits,  # [S, V]
    maxima,  # fp32 [S, C]; infinity if the tile is not finite
    tokens,  # int32 [S, C]: the first token with the maximum
    logits_stride,
    V,
    num_tiles,  # C
    TOKENS: tl.constexpr,
):
    """Find the maximum of each tile of TOKENS logits, and the first token that has it.

    There is one program for each tile.
    """
    seq = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    inside = token < V
    logit = tl.load(logits + seq * logits_stride + token, mask=inside, other=0.0).to(tl.float32)
    is_good = tl.abs(logit) < float("inf")  # false for NaN, too
    largest = tl.max(tl.where(inside & is_good, logit, float("-inf")), axis=0)
    first = tl.min(tl.where(inside & (logit == largest), token, V - 1), axis=0)
    num_bad = tl.sum(tl.where(is_good, 0, 1), axis=0)
    place = seq * num_tiles + tile
    tl.store(maxima + place, tl.where(num_bad > 0, float("inf"), largest))
    tl.store(tokens + place, first)


@triton.jit(do_not_specialize=["num_tiles"])
def _row_maxima_kernel(
    maxima,  # fp32 [S, C]
    tokens,  # int32 [S, C]
    out,  # int64[S]
    is_finite,  # bool[S]
    num_tiles,  # C
    TILES: tl.constexpr,  # a power of two, at least C
):
    """Store in `out[s]` the token of the first tile that has the maximum of row s.

    If a tile is not finite, its maximum is infinity; then `is_finite[s]` is false. There is one
    program for each row.
    """
    seq = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    inside = tile < num_tiles
    largest = tl.load(maxima + seq * num_tiles + tile, mask=inside, other=float("-inf"))
    of_row = tl.max(largest, axis=0)
    first = tl.min(tl.where(inside & (largest == of_row), tile, num_tiles - 1), axis=0)
    tl.store(out + seq, tl.load(tokens + seq * num_tiles + first).to(tl.int64))
    tl.store(is_finite + seq, of_row < float("inf"))


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `kernels.reference.greedy`; the stride of `logits` over S may be any.

    Raises:
        ValueError: `logits` is not 2-dimensional, has no float dtype, or has no dense rows.
    """
    check_float("logits", logits, 2)
    num_seqs, num_tokens = logits.shape
    num_tiles = triton.cdiv(num_tokens, _TOKENS)
    maxima = torch.empty(num_seqs, num_tiles, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_seqs, num_tiles, dtype=torch.int32, device=logits.device)
    out = torch.empty(num_seqs, dtype=torch.int64, device=logits.device)
    is_finite = torch.empty(num_seqs, dtype=torch.bool, device=logits.device)
    _tile_maxima_kernel[(num_seqs, num_tiles)](
        logits, maxima, tokens, logits.stride(0), num_tokens, num_tiles, TOKENS=_TOKENS
    )
    tiles = triton.next_power_of_2(num_tiles)
    _row_maxima_kernel[(num_seqs,)](maxima, tokens, out, is_finite, num_tiles, TILES=tiles)
    return out, is_finite
