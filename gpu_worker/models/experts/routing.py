"""Chooses a token's experts by softmax or sigmoid scores.

In some models the experts form groups, and a token's experts must be in the best groups. The
outputs of a token's experts are added, each multiplied by the expert's *share*.

Symbols: `T` tokens, `E` hidden size, `X` experts, `G` groups of experts, `N` experts per token.
"""

from dataclasses import dataclass

import torch

from gpu_worker.models.experts.config import ExpertsConfig, Routing
from gpu_worker.weights.linear import Linear
from gpu_worker.weights.reader import Weights


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """Chooses the best experts of the best groups, in float32."""

    config: ExpertsConfig
    scores: Linear
    """E to X, in float32."""
    bias: torch.Tensor | None = None
    """float32[X]: added to sigmoids to choose experts, but not to compute the experts' shares; None
    with softmax scores."""

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose N experts for each token; `x` has the tokens' hidden states, `[T, E]`.

        Returns:
            The shares of the chosen experts, float32 `[T, N]`, and their numbers, int64 `[T, N]`.
        """
        config, logits = self.config, self.scores(x.float())
        if config.routing is Routing.SOFTMAX:
            scores = logits.softmax(-1)  # [T, X]
            merits, num_best = scores, 1
        else:
            assert self.bias is not None, "sigmoid scores have a bias"
            scores = sigmoid(logits)
            merits, num_best = scores + self.bias, 2
        if config.num_chosen_groups < config.num_groups:
            by_group = merits.view(len(x), config.num_groups, -1)  # [T, G, X / G]
            of_groups = by_group.topk(min(num_best, by_group.shape[2]), dim=-1).values.sum(-1)
            groups = of_groups.topk(config.num_chosen_groups, dim=-1).indices
            is_out = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, groups, value=False)
            merits = by_group.masked_fill(is_out.unsqueeze(2), float("-inf")).flatten(1)
        chosen = merits.topk(config.num_per_token, dim=-1).indices
        shares = scores.gather(1, chosen)
        if config.has_shares_of_one:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
        return shares if config.share_factor == 1 else shares * config.share_factor, chosen


def read_router(name: str, num_experts: int, hidden: int, weights: Weights) -> torch.Tensor:
    """Read a router's weight in float32: rounded or quantized weights may choose other experts."""
    return weights.tensor(f"{name}.weight", num_experts, hidden, dtype=torch.float32)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Compute the sigmoid, so that each number's result depends on this number alone.

    On CPUs the last bits of `torch.sigmoid` depend also on the number's position in the tensor.
    """
    return torch.stack((x, torch.zeros_like(x)), -1).softmax(-1)[..., 0]
