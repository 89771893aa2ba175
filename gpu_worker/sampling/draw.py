"""The random number of each draw; on a CPU, also the draw for rows with top-k, top-p or min-p.

`sampler.py` chooses the code that draws. On a GPU it chooses a kernel. On a CPU it chooses C code
for rows without top-k, top-p and min-p, and this module for all other rows.

Symbols: `S` sequences, `V` vocabulary.
"""

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from contract.arrays import Int64Array, Uint64Array

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_TILE = 256


def uniforms(seeds: Uint64Array, positions: Int64Array) -> npt.NDArray[np.float64]:
    """Return float64[S] in [0, 1): a random number for each seed and position, by SplitMix64.

    For seed `s` and position `p` (the index of the token to draw; the first prompt token's is 0),
    take the (p + 1)-th output of a SplitMix64 generator that starts at `s`. The number is that
    output's upper 53 bits times 2^-53. All arithmetic is modulo 2^64, and `>>` shifts in zeros::

        x = s + (p + 1) * 0x9E3779B97F4A7C15
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        u = ((x ^ (x >> 31)) >> 11) * 2^-53

    Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
    """
    x = seeds + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    top_bits: Uint64Array = (x ^ (x >> np.uint64(31))) >> np.uint64(11)
    return np.ldexp(top_bits.astype(np.float64), -53)


def draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw a token for each row, with probabilities proportional to the row's weights.

    The token is the first at which the running sum of the weights, in the order of token ids,
    exceeds `uniform` times the sum of all the row's weights. A running sum over a whole vocabulary
    is slow on every device. So this function divides the vocabulary into tiles of 256 tokens. It
    first finds the token's tile, by the running sum of the tiles' sums, and then the token in that
    tile. Sums are float64 and per row, so a row draws the same token in any batch.

    Args:
        weights: float32[S, V], not negative; unnormalized probabilities.
        uniform: float64[S] in [0, 1), one random number for each row.

    Returns:
        int64[S]: ids of tokens with positive weight. A row without such tokens, or with NaN, gets
            some valid id.
    """
    num_tokens = weights.shape[1]
    padded = weights
    if num_tokens % _TILE:
        padded = F.pad(weights, (0, -num_tokens % _TILE))
    tiles = padded.view(len(padded), -1, _TILE)  # [S, V / 256, 256]
    ends = tiles.sum(-1, dtype=torch.float64).cumsum(-1)  # [S, V / 256]
    target = (uniform * ends[:, -1]).unsqueeze(1)  # [S, 1]
    tile = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)  # [S, 1]
    before = torch.where(tile > 0, ends.gather(1, (tile - 1).clamp_(min=0)), 0.0)  # [S, 1]
    chosen = tiles.gather(1, tile.unsqueeze(2).expand(-1, -1, _TILE)).squeeze(1)  # [S, 256]
    inner = chosen.cumsum(-1, dtype=torch.float64)
    offset = torch.searchsorted(inner, target - before, right=True)  # [S, 1]
    # The running sum within the tile may differ from the tile's sum in the last bits. So never go
    # past the last positive weight, where the running sum first reaches its maximum.
    offset = torch.minimum(offset, inner.argmax(-1, keepdim=True))
    return (tile * _TILE + offset).squeeze(1).clamp_(max=num_tokens - 1)
