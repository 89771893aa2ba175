"""Which tokens a mask of `transformers` lets a token see: all before it, or a window."""

from collections.abc import Callable

import torch

from gpu_worker.weights.json_fields import ModelError

MaskFunction = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | bool
]
"""Whether, by index of batch, head, query and key, the query sees the key; element by element."""


def read_window(sees: MaskFunction, num_positions: int) -> int | None:
    """How many tokens a token sees by this mask, itself included; None for all before it.

    Only rows of the mask are made, so that `num_positions` may be large.

    Raises:
        ModelError: it sees others than the last so many, or it depends on what the tokens are.
    """
    positions = torch.arange(num_positions, device="cpu")
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    last = num_positions - 1
    window: int | None = None
    for query in (last, max(0, last - 1), last // 2, 0):
        try:
            seen = torch.as_tensor(sees(zero, zero, positions[query], positions), device="cpu")
            visible = seen.expand(num_positions)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise ModelError(f"its masks depend on what they are for: {error}") from error
        if query == last:
            num_visible = int(visible.sum())
            window = num_visible if num_visible < num_positions else None
        first = 0 if window is None else max(0, query - window + 1)
        if not torch.equal(visible, (positions >= first) & (positions <= query)):
            raise ModelError("its masks are neither causal nor a sliding window")
    return window
