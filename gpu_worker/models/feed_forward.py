"""A layer's gated feed-forward part, or one of the layer's experts.

Symbols: `T` tokens, `E` hidden size, `I` intermediate size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from gpu_worker.weights.linear import Linear
from gpu_worker.weights.reader import Weights
from kernels import ops

FeedForward: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""The part of a layer after attention: maps `[T, E]` to `[T, E]`, token by token."""
Gate: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Combines gate and up, `[T, 2 * I]`, into `[T, I]`: in most families, `activation(gate) * up`."""


def silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute `silu(gate) * up`, as most families do."""
    return ops.silu_mul(gate_up)


def tanh_gelu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute `gelu(gate) * up` with GELU's tanh approximation, as Gemma does."""
    return ops.tanh_gelu_mul(gate_up)


GATES: Final[dict[str, Gate]] = {"silu": silu_gate, "gelu_pytorch_tanh": tanh_gelu_gate}
"""The gates, by the name of the activation in config.json."""


@dataclass(frozen=True, slots=True, eq=False)
class GatedMlp:
    """A gated feed-forward part, or one of several experts."""

    gate_up: Linear
    """E to 2 * I: gate, then up."""
    down: Linear
    """I to E."""
    gate: Gate = silu_gate

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute `down(silu(gate(x)) * up(x))`, if `self.gate` is `silu_gate`.

        Maps `[T, E]` to `[T, E]`.
        """
        return self.down(self.gate(self.gate_up(x)))


def build_gated_mlp(
    hidden: int,
    size: int,
    module: str,
    weights: Weights,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    *,
    bias: bool = False,
    gate: Gate = silu_gate,
) -> GatedMlp:
    """Build this rank's part of a gated MLP; the caller sums the ranks' results.

    Args:
        hidden: Hidden size, E.
        size: Intermediate size, I.
        module: The MLP's name in the checkpoint.
        weights: The checkpoint.
        names: The names of gate, up and down in the module.
        bias: Whether the three maps have biases.
        gate: Combines the results of gate and up.
    """
    gate_name, up, down = (f"{module}.{name}" for name in names)
    return GatedMlp(
        gate_up=weights.split_outputs(hidden, (gate_name, size, 1), (up, size, 1), bias=bias),
        down=weights.split_inputs(size, 1, (down, hidden), bias=bias),
        gate=gate,
    )
