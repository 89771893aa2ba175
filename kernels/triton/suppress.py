"""Suppresses tokens that a bit mask does not admit.

Symbols: `S` sequences, `G` sequences with a mask, `V` vocabulary, `W` words of a mask (V / 32,
rounded up).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202  Triton infers the types inside kernels

from typing import Final

import torch
import triton
import triton.language as tl

from kernels.checks import check_suppression

_TOKENS: Final = 1024  # tokens of one program


@triton.jit(
    do_not_specialize_on_alignment=["places", "admitted"],
)
def _suppress_kernel(
    logits,  # fp32 [S, V]
    places,  # int64[G]
    admitted,  # int32[G, W]
    logits_stride_s,
    admitted_stride_g,
    V: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """`logits[places[g], t] = -inf` where bit t % 32 of `admitted[g, t // 32]` is 0.

    Each program reads the bits of TOKENS tokens in one mask.
    """
    g = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    inside = token < V
    words = tl.load(admitted + g * admitted_stride_g + token // 32, mask=inside, other=-1)
    is_suppressed = ((words >> (token % 32)) & 1) == 0
    row = logits + tl.load(places + g) * logits_stride_s
    tl.store(row + token, float("-inf"), mask=inside & is_suppressed)


def suppress(logits: torch.Tensor, places: torch.Tensor, admitted: torch.Tensor) -> None:
    """Set a logit to -inf if its row of `logits` has a mask and the token's bit in the mask is 0.

    Args:
        logits: float32[S, V].
        places: int64[G], the index of the row of `logits` for each mask; no index occurs twice.
        admitted: int32[G, W], the masks; bit t % 32 of word t // 32 is for token t.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    check_suppression(logits, places, admitted)
    num_masks, num_tokens = len(places), logits.shape[1]
    if num_masks == 0:
        return
    _suppress_kernel[(num_masks, triton.cdiv(num_tokens, _TOKENS))](
        logits, places, admitted, logits.stride(0), admitted.stride(0), V=num_tokens, TOKENS=_TOKENS
    )
