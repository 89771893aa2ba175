"""A feed-forward part of which each token takes a few: a mixture of experts, as in Mixtral.

Symbols: `T` tokens, `E` hidden size, `X` experts, `N` of them that a token takes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gpu_worker.weights.linear import Linear


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """Experts and the router that chooses among them; it never changes."""

    router: Linear
    """E to X."""
    experts: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    """Each `[T, E]` to `[T, E]`, row by row."""
    num_per_token: int
    """N."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`sum_n p_n expert_n(x)` over each token's N likeliest experts, whose p sum to 1.

        Tokens are grouped by expert, so that each expert in use runs once. A row's result does not
        depend on the others: the sum is in the order of the row's own experts. Waits for the device
        once, to learn how many tokens each expert has.

        Args:
            x: `[T, E]`.

        Returns:
            `[T, E]`.
        """
        num_tokens, num_chosen = x.shape[0], self.num_per_token
        shares, chosen = self.router(x).float().softmax(-1).topk(num_chosen, dim=-1)  # [T, N]
        shares = shares / shares.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)  # [T * N], by expert
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        grouped = x.index_select(0, order // num_chosen)  # [T * N, E]
        outputs = torch.cat(
            [
                expert(rows)
                for expert, rows in zip(self.experts, torch.split(grouped, counts), strict=True)
                if rows.shape[0]
            ]
        )
        by_token = torch.empty_like(outputs)
        by_token[order] = outputs
        weighted = by_token.view(num_tokens, num_chosen, -1) * shares.unsqueeze(-1)
        return weighted.sum(1).to(x.dtype)
