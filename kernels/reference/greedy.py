"""The likeliest token of each row of logits, in plain torch.

Symbols: `S` sequences, `V` vocabulary.
"""

import torch


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index of each row's first maximum, and whether all logits of the row are finite.

    `logits` is [S, V].

    The results are int64[S] and bool[S]. For a row with a logit that is not finite, the index is an
    arbitrary valid token id.
    """
    return logits.argmax(1), logits.isfinite().all(1)
