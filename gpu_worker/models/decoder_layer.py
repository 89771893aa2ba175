"""A layer's linear maps, to which LoRA adapters may add, and the layer of a Llama-like decoder.

Symbols: `H` query heads, `HKV` kv heads, `D` head dim, `E` hidden size.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from gpu_worker.models.feed_forward import FeedForward
from gpu_worker.weights.linear import Linear
from kernels.cpu.program.low_rank import RowAdapters


@dataclass(frozen=True, slots=True, eq=False)
class AdaptableLayer:
    """The linear maps of one layer, to which LoRA adapters may add."""

    qkv: Linear
    """E to (H + 2 * HKV) * D: queries, keys and values, in the order that the decoder expects."""
    attention_output: Linear
    """H * D to E."""
    feed_forward: FeedForward


LayerT = TypeVar("LayerT", bound=AdaptableLayer)


@dataclass(frozen=True, slots=True, eq=False)
class QkNorm:
    """Norms of queries and keys before rotation: of each head, or of all heads together."""

    query: torch.Tensor
    """`[D]`, or `[H * D]`."""
    key: torch.Tensor
    """`[D]`, or `[HKV * D]`."""


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer(AdaptableLayer):
    """The weights of one layer of a Llama-shaped decoder."""

    input_norm: torch.Tensor | None
    """`[E]`, before attention."""
    qk_norm: QkNorm | None
    window: int | None
    """Number of tokens that a token sees, itself included; None: all before it."""
    mlp_norm: torch.Tensor | None
    """`[E]`, before the feed-forward part."""
    attention_output_norm: torch.Tensor | None = None
    """`[E]`, applied to what attention adds to the residual."""
    mlp_output_norm: torch.Tensor | None = None
    """`[E]`, applied to what the feed-forward part adds to the residual."""
    sinks: torch.Tensor | None = None
    """float32[H]: see `attend`."""


class LayerAdapters(Protocol):
    """The LoRA adapters of a step's tokens."""

    @property
    def native(self) -> RowAdapters | None:
        """The adapters as `NativeDecoder` takes them; None: `NativeDecoder` cannot apply them."""

    def onto(self, index: int, layer: LayerT) -> LayerT:
        """Return a copy of `layer`, the layer at `index`, with the adapters added to its maps."""
