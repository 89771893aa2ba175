"""Draws one token from each row of logits, in plain torch.

Symbols: `S` sequences, `V` vocabulary.
"""

from typing import Final

import torch

_GAMMA: Final = 0x9E3779B97F4A7C15 - 2**64  # the int64 with the same bits
_MIX: Final = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


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

    A token's weight is `exp((logit - max) / temperature)`, where max is the largest logit of the
    row. First, top_k keeps the k largest weights. Of these k weights, top_p keeps the largest ones,
    just enough to reach p times the sum of the k weights. Then min_p keeps weights of at least
    min_p times the largest. Of equal weights, those with lower token ids are kept first.

    The drawn token is the first, in the order of token ids, at which the running sum of the kept
    weights exceeds u times the sum of all kept weights. The random number u, in [0, 1), depends
    only on seed and position (`uniforms`). Sums are fp64. The token of a row does not depend on
    other rows.

    `temperature` is fp32[S] above 0, `top_k` int64[S] in [1, V], `top_p` fp64[S] in (0, 1], `min_p`
    fp32[S] in [0, 1], and `positions` int64[S]. `seeds` is int64[S] with the bits of unsigned
    seeds. A row without a finite maximum gives an arbitrary valid id.
    """
    num_tokens = logits.shape[1]
    lowest = torch.finfo(torch.float32).min
    scaled = logits - logits.amax(1, keepdim=True).clamp(min=lowest)
    scaled = scaled / temperature.unsqueeze(1)
    weights = scaled.exp()
    ordered, ids = scaled.sort(dim=1, descending=True, stable=True)
    sums = ordered.exp().cumsum(1, dtype=torch.float64)  # [S, V]
    k, p = top_k.unsqueeze(1), top_p.unsqueeze(1)  # [S, 1]
    reaching_p = 1 + (sums < p * sums.gather(1, k - 1)).sum(1, keepdim=True)
    count = torch.where(p < 1, torch.minimum(reaching_p, k), k)
    rank = torch.empty_like(ids)
    rank.scatter_(1, ids, torch.arange(num_tokens, device=ids.device).expand_as(ids))
    weights = weights.masked_fill((rank >= count) | (weights < min_p.unsqueeze(1)), 0.0)
    running = weights.cumsum(1, dtype=torch.float64)
    target = uniforms(seeds, positions).unsqueeze(1) * running[:, -1:]
    token = torch.searchsorted(running, target, right=True)
    # Rounding may raise the target to the sum of all weights, so the result is at most the last
    # token with any weight.
    return torch.minimum(token, running.argmax(1, keepdim=True)).squeeze(1)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return a number in [0, 1) for each pair of a seed and a position, fp64[S].

    The number is made of the (position + 1)-th output of the seed's SplitMix64 generator: the upper
    53 bits of this output, times 2^-53. The generator is from Steele, Lea, Flood: Fast splittable
    pseudorandom number generators, OOPSLA 2014.
    """
    x = seeds + (positions + 1) * _GAMMA  # int64 wraps as unsigned numbers do
    x = (x ^ _shifted(x, 30)) * _MIX[0]
    x = (x ^ _shifted(x, 27)) * _MIX[1]
    return _shifted(x ^ _shifted(x, 31), 11).double() * 2.0**-53


def _shifted(x: torch.Tensor, count: int) -> torch.Tensor:
    """Shift right and fill with zeros; int64's own shift would repeat the sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)
