"""Suppresses tokens that a bit mask does not admit, in plain torch.

Symbols: `S` sequences, `G` sequences with a mask, `V` vocabulary, `W` words of a mask (V / 32,
rounded up).
"""

import torch


def suppress(logits: torch.Tensor, places: torch.Tensor, admitted: torch.Tensor) -> None:
    """In each row of `logits` with a mask, set to -inf the logits of tokens whose mask bit is 0.

    Args:
        logits: float32[S, V].
        places: int64[G], the index of the row of `logits` for each mask; no index occurs twice.
        admitted: int32[G, W], the masks; bit t % 32 of word t // 32 is for token t.
    """
    bits = torch.arange(32, dtype=torch.int32, device=admitted.device)
    is_suppressed = ((admitted.unsqueeze(2) >> bits) & 1) == 0  # [G, W, 32]
    is_suppressed = is_suppressed.flatten(1)[:, : logits.shape[1]]
    masked = logits.index_select(0, places).masked_fill_(is_suppressed, -torch.inf)
    logits.index_copy_(0, places, masked)
