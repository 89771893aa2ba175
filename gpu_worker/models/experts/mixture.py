"""Computes mixtures of experts: one expert after the other, or all experts together on a GPU.

Symbols: `T` tokens, `E` hidden size, `X` experts, `N` experts per token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from gpu_worker.models.experts.routing import sigmoid
from gpu_worker.models.feed_forward import FeedForward, Gate, GatedMlp
from gpu_worker.weights import gpu_linear
from gpu_worker.weights.grouped_linear import GroupedLinear, group
from gpu_worker.weights.linear import Linear
from kernels.triton.linear.tile_sizes import fewest_rows

Route: TypeAlias = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Takes hidden states, `[T, E]`, and chooses N experts for each token, as `Router` does."""


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """A mixture of experts, computed one expert after the other. Immutable."""

    route: Route
    experts: tuple[FeedForward, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute `sum_n share_n expert_n(x)` over the N experts of each token.

        Tokens are grouped by expert, so that each expert in use runs once. A token's result does
        not depend on other tokens, because the results of the token's experts are added in the
        order in which `route` returns the experts. The call waits for the device, to learn the
        number of tokens per expert.

        Args:
            x: `[T, E]`.

        Returns:
            `[T, E]`.
        """
        shares, chosen = self.route(x)
        num_tokens, num_chosen = chosen.shape
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


@dataclass(frozen=True, slots=True, eq=False)
class GroupedExperts:
    """A mixture of experts, computed in two matrix products: gate and up of all experts, then down.

    The host never waits: the number of tokens per expert stays on the device, so one graph works
    for any choice of experts.
    """

    route: Route
    gate_up: GroupedLinear
    down: GroupedLinear
    gate: Gate
    numbers: torch.Tensor
    """int64[X]: the numbers of the experts, from 0."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Experts`."""
        shares, chosen = self.route(x)
        num_tokens, num_chosen = chosen.shape
        by_expert, order = chosen.flatten().sort(stable=True)  # [T * N]
        ends = torch.searchsorted(by_expert, self.numbers, right=True, out_int32=True)  # [X]
        by_token = self._products(x, ends, order // num_chosen, order)
        weighted = by_token.view(num_tokens, num_chosen, -1) * shares.unsqueeze(-1)
        return weighted.sum(1).to(x.dtype)

    def _products(
        self, x: torch.Tensor, ends: torch.Tensor, sources: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        num_rows = len(sources)
        gated = self.gate(self.gate_up(x, ends, sources, None, num_rows))
        return self.down(gated, ends, None, places, num_rows)

    def compile(self, row: torch.Tensor) -> None:
        """Launch each variant of the kernels once, so that none is compiled while serving.

        `row` is an example of an activation, `[1, E]`.
        """
        for num_rows in fewest_rows(len(self.numbers)):
            places = self.numbers.new_zeros(num_rows)
            self._products(row, torch.zeros_like(self.numbers, dtype=torch.int32), places, places)


def make_experts(
    route: Route, experts: Sequence[GatedMlp], row: torch.Tensor
) -> Experts | GroupedExperts:
    """Make `GroupedExperts` on a GPU if kernels support the experts' maps, otherwise `Experts`.

    All experts have the same gate. `row` is an example of an activation, `[1, E]`: only its dtype
    and device matter.
    """
    if gpu_linear.is_here(row.device):
        gate_up = group([each.gate_up for each in experts])
        down = group([each.down for each in experts])
        if gate_up is not None and down is not None:
            numbers = torch.arange(len(experts), device=row.device)
            grouped = GroupedExperts(route, gate_up, down, experts[0].gate, numbers)
            grouped.compile(row)
            return grouped
    return Experts(route, tuple(experts))


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsAndShared:
    """Routed experts, and a shared one that computes every token."""

    routed: FeedForward
    shared: GatedMlp
    gate: Linear | None = None
    """Maps `[T, E]` to `[T, 1]`. The shared expert's output is multiplied by the sigmoid of this
    result. None: the output is not multiplied."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, E]` to `[T, E]`."""
        shared = self.shared(x)
        if self.gate is not None:
            shared = shared * sigmoid(self.gate(x))
        return self.routed(x) + shared
