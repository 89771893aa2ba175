"""The weights of one layer of a Llama-shaped decoder.

Symbols: `T` tokens, `H` query heads, `HKV` kv heads, `D` head dim, `E` hidden size, `I`
intermediate size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from gpu_worker.weights.linear import Linear
from kernels import ops

FeedForward: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""The part of a layer after attention: maps `[T, E]` to `[T, E]`, row by row."""


@dataclass(frozen=True, slots=True, eq=False)
class GatedMlp:
    """The feed-forward part that every token takes, or one expert of several."""

    gate_up: Linear
    """E to 2 * I: gate, then up."""
    down: Linear
    """I to E."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`down(silu(gate(x)) * up(x))`: `[T, E]` to `[T, E]`."""
        return self.down(ops.silu_mul(self.gate_up(x)))


@dataclass(frozen=True, slots=True, eq=False)
class QkNorm:
    """Norms of each head of queries and keys before rotation."""

    query: torch.Tensor
    """`[D]`."""
    key: torch.Tensor
    """`[D]`."""


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """The weights of one layer."""

    input_norm: torch.Tensor
    """`[E]`, before attention."""
    qkv: Linear
    """E to (H + 2 * HKV) * D: queries, keys, values."""
    qk_norm: QkNorm | None
    window: int | None
    """How many tokens a token sees, itself included; None for all before it."""
    attention_output: Linear
    """H * D to E."""
    mlp_norm: torch.Tensor
    """`[E]`, before the feed-forward part."""
    feed_forward: FeedForward
