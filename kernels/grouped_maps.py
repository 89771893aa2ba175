"""Several linear maps, such as experts, in one launch; each row of the input uses one map."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

ALIGNMENT: Final = 16
"""The addresses of weights are multiples of this number of bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupedMaps:
    """The weights of X maps from K to N features, which a kernel finds by their addresses.

    If `is_by_input`, a *whole* weight is `[K, N]`, with a row for each input feature. A weight may
    have rows for only the first inputs; its map ignores the other inputs.

    If `is_by_input` is false, a whole weight is `[N, K]`, with a row for each output feature. A
    weight may have rows for only the first outputs; its map does not write the other outputs. Rows
    are dense.
    """

    num_in: int
    """The number of input features, K."""
    num_out: int
    """The number of output features, N."""
    weights: list[torch.Tensor | None]
    """The weight of each map; None: nothing is computed for input rows that use this map. The
    caller owns the list and the tensors."""
    addresses: torch.Tensor
    """int64[X] on the device, the address of each weight, or 0 for None."""
    sizes: torch.Tensor
    """int32[X] on the device, the number of rows of each weight."""
    is_by_input: bool = False
    biases: torch.Tensor | None = None
    """`[X, N]`, contiguous; given only if all weights are whole. None: zeros."""

    @classmethod
    def of(
        cls, weights: Sequence[torch.Tensor], biases: torch.Tensor | None = None
    ) -> "GroupedMaps":
        """Make maps from whole weights `[N, K]` on one device; the weights are not copied.

        Raises:
            ValueError: A weight's address is not a multiple of `ALIGNMENT`, or its rows are not
                contiguous.
        """
        num_out, num_in = weights[0].shape
        for weight in weights:
            if weight.data_ptr() % ALIGNMENT or not weight.is_contiguous():
                raise ValueError(
                    f"a weight is at {weight.data_ptr()} with strides {weight.stride()}, required"
                    f" are a multiple of {ALIGNMENT} and dense rows"
                )
        device = weights[0].device
        addresses = torch.tensor([each.data_ptr() for each in weights], device=device)
        sizes = torch.full((len(weights),), num_out, dtype=torch.int32, device=device)
        return cls(num_in, num_out, list(weights), addresses, sizes, biases=biases)
