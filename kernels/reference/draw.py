"""Draws tokens from logits without top-k, top-p or min-p, in plain torch.

Symbols: `S` sequences, `N` sequences for which a token is drawn, `V` vocabulary.
"""

import torch


def draw(
    logits: torch.Tensor, places: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Draw a token from each row of `logits` that `places` lists; see `kernels.cpu.ops.draw`."""
    chosen = logits.index_select(0, places)
    largest = chosen.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    weights = ((chosen - largest) / temperature.unsqueeze(1)).exp()
    running = weights.cumsum(1, dtype=torch.float64)
    target = uniform.unsqueeze(1) * running[:, -1:]
    token_ids = torch.searchsorted(running, target, right=True)
    # Rounding may raise the target to the sum of all weights, so the result is at most the last
    # token with any weight.
    return torch.minimum(token_ids, running.argmax(1, keepdim=True)).squeeze(1)
