"""Rounds the weight of a linear map to integers, and changes the map's outputs as little as it can.

GPTQ (Frantar et al., 2022): input features are rounded one after another, those with large inputs
first. To compensate for the error of a rounded feature, the method changes the weights of all later
features. The change compensates for the error only as far as the inputs of the later features are
correlated with the inputs of the rounded feature.

Input features form groups. A group has one scale and one zero for each output feature, which are
chosen before any feature is rounded. Scale and zero define the group's *grid*: the numbers to which
its weights can be rounded.

Symbols: `N` output features of a linear map, `K` its input features, `G` groups of input features.
"""

from dataclasses import dataclass
from typing import Final

import torch

_RANGES: Final = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""For each of these fractions, `_fit_grid` tries a grid that covers this fraction of the range of a
group's weights. A smaller fraction makes the grid finer, but clips outliers."""
_DAMPING: Final = 0.01
"""Damping: each diagonal entry of `products` grows by this fraction of the diagonal's mean."""
_PIECE: Final = 128
"""Number of features to round before passing their errors to later features."""
_LEAST_SCALE: Final = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class RoundedWeight:
    """A weight `[N, K]` in integers: each number is `(value - zero) * scale`."""

    values: torch.Tensor
    """int32[N, K], at least 0."""
    zeros: torch.Tensor
    """int32[N, G]."""
    scales: torch.Tensor
    """float16[N, G]."""

    def dequantized(self) -> torch.Tensor:
        """Return the weight, float32[N, K]."""
        grouped = self.values.view(*self.scales.shape, -1) - self.zeros.unsqueeze(2)
        return (grouped * self.scales.float().unsqueeze(2)).flatten(1)


def round_to_nearest(weight: torch.Tensor, bits: int, group_size: int) -> RoundedWeight:
    """Round each number to the nearest one of its group's grid, which covers the group's range."""
    groups = weight.float().view(weight.shape[0], -1, group_size)
    scales, zeros = _grid(groups, bits, 1.0)
    values = _round(groups, scales, zeros, bits)
    return RoundedWeight(values.flatten(1).int(), zeros.squeeze(2).int(), scales.squeeze(2).half())


def round_for_inputs(
    weight: torch.Tensor, products: torch.Tensor, bits: int, group_size: int
) -> RoundedWeight:
    """Round a map's weight so that the outputs for the map's past inputs change little.

    Args:
        weight: `[N, K]`.
        products: `[K, K]`, the sum of `x @ x.T` over inputs x; zeros if there were none.
        bits: 4 or 8.
        group_size: Number of input features in a group; K is a multiple of this number.
    """
    weight = weight.float().clone()
    squares = products.diagonal()
    if not squares.any():
        return round_to_nearest(weight, bits, group_size)
    scales, zeros = _fit_grid(weight, squares, bits, group_size)
    order = squares.argsort(descending=True)
    of_group = order // group_size
    upper = _error_shares(products[order][:, order])
    weight = weight[:, order]
    values = torch.empty_like(weight)
    num_in = weight.shape[1]
    for start in range(0, num_in, _PIECE):
        stop = min(start + _PIECE, num_in)
        errors = torch.empty(weight.shape[0], stop - start)
        for place in range(start, stop):
            scale, zero = scales[:, of_group[place]], zeros[:, of_group[place]]
            exact = weight[:, place]
            values[:, place] = _round(exact, scale, zero, bits)
            lost = exact - (values[:, place] - zero) * scale
            error = lost / upper[place, place]
            weight[:, place:stop] -= torch.outer(error, upper[place, place:stop])
            errors[:, place - start] = error
        weight[:, stop:] -= errors @ upper[start:stop, stop:]
    in_order = torch.empty_like(values)
    in_order[:, order] = values
    return RoundedWeight(in_order.int(), zeros.int(), scales.half())


def _error_shares(products: torch.Tensor) -> torch.Tensor:
    """Return the upper Cholesky factor, `[K, K]`, of the inverse of damped `products`.

    `products` is as in `round_for_inputs`, but with the features in the order of their rounding.
    With the factor `U`, the weight of a later feature j changes by `U[k, j] / U[k, k]` per unit of
    feature k's error.
    """
    damped = products.double()
    squares = damped.diagonal()
    squares[squares == 0] = 1.0  # a feature that never occurs
    squares += _DAMPING * squares.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return upper.float()


def _fit_grid(
    weight: torch.Tensor, squares: torch.Tensor, bits: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and zeros, float32[N, G], of the grids with the least rounding error.

    A grid's error is a sum over the weights that are rounded to this grid. Each summand is the
    squared error of a weight, times the entry of `squares` for the weight's input feature.
    """
    groups = weight.view(weight.shape[0], -1, group_size)
    importance = squares.float().view(1, -1, group_size)
    scales, zeros = _grid(groups, bits, _RANGES[0])
    least = _error(groups, importance, scales, zeros, bits)
    for share in _RANGES[1:]:
        tried = _grid(groups, bits, share)
        error = _error(groups, importance, *tried, bits)
        is_better = error < least
        scales, zeros = (
            torch.where(is_better, new, old)
            for new, old in zip(tried, (scales, zeros), strict=True)
        )
        least = torch.minimum(error, least)
    return scales.squeeze(2), zeros.squeeze(2)


def _grid(groups: torch.Tensor, bits: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and zeros, float32[N, G, 1], of grids that cover `share` of a group's range.

    `groups` are the weights, `[N, G, K / G]`.
    """
    most = 2**bits - 1
    low = share * groups.amin(2, keepdim=True).clamp(max=0)
    high = share * groups.amax(2, keepdim=True).clamp(min=0)
    scales = ((high - low) / most).clamp(min=_LEAST_SCALE).half().float()
    return scales, (-low / scales).round().clamp(0, most)


def _round(
    exact: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int
) -> torch.Tensor:
    return ((exact / scales).round() + zeros).clamp(0, 2**bits - 1)


def _error(
    groups: torch.Tensor,
    importance: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bits: int,
) -> torch.Tensor:
    lost = (_round(groups, scales, zeros, bits) - zeros) * scales - groups
    return (lost.square_() * importance).sum(2, keepdim=True)
