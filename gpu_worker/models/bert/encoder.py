"""Encoders of BERT's shape: BERT, RoBERTa, XLM-RoBERTa; alone, or with a classification head.

A token attends to all tokens of its sequence, so a prompt is computed as a whole, and its KV is not
kept.

Symbols: `T` tokens, `N` tokens whose final hidden states are wanted, `P` sequences to score, `H`
heads, `D` head dim, `E` hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from gpu_worker.models.activations import ACTIVATIONS
from gpu_worker.models.attention import AttentionMetadata
from gpu_worker.models.bert.config import BertConfig
from gpu_worker.weights.linear import Linear
from gpu_worker.weights.reader import Weights

Norm = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    qkv: Linear
    """E to 3 E."""
    attention_out: Linear
    attention_norm: Norm
    up: Linear
    activation: Callable[[torch.Tensor], torch.Tensor]
    down: Linear
    norm: Norm


@dataclass(frozen=True, eq=False)
class Bert:
    """An encoder. Immutable. Call it in `torch.inference_mode()`."""

    config: BertConfig
    words: torch.Tensor
    positions: torch.Tensor
    token_types: torch.Tensor
    norm: Norm
    layers: tuple[_Layer, ...]
    head: tuple[Linear, Linear] | None
    """Two maps: E to E, then E to 1, the score; None: the model makes no scores."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        pool: Any,  # noqa: ARG002 - an encoder keeps no KV
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Compute whole sequences; return the wanted tokens' final hidden states, `[N, E]`."""
        hidden = functional.embedding(token_ids, self.words)
        hidden = hidden + functional.embedding(
            positions + self.config.first_position, self.positions
        )
        types = metadata.token_types
        if types is None or self.config.num_token_types == 1:
            types = torch.zeros_like(token_ids)
        hidden = self.norm(hidden + functional.embedding(types, self.token_types))
        bounds = metadata.query_start_loc.tolist()
        for layer in self.layers:
            attended = self._attend(layer.qkv(hidden), bounds)
            hidden = layer.attention_norm(layer.attention_out(attended) + hidden)
            hidden = layer.norm(layer.down(layer.activation(layer.up(hidden))) + hidden)
        return metadata.select(hidden)

    def _attend(self, qkv: torch.Tensor, bounds: list[int]) -> torch.Tensor:
        """Attend within each sequence separately, so that sequences do not affect each other."""
        heads = qkv.view(len(qkv), 3, self.config.num_heads, -1).permute(1, 2, 0, 3)  # [3,H,T,D]
        parts = [
            functional.scaled_dot_product_attention(*heads[:, None, :, start:end])[0]
            for start, end in pairwise(bounds)
        ]
        return torch.cat(parts, dim=1).transpose(0, 1).reshape(len(qkv), -1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Never called: requests that generate are refused."""
        raise NotImplementedError

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map the hidden states of the sequences' first tokens, `[P, E]`, to scores, `[P, 1]`."""
        assert self.head is not None, "only a model with a head is asked for scores"
        dense, out = self.head
        return out(dense(hidden).tanh())


def build_bert(config: BertConfig, weights: Weights) -> Bert:
    """Build the model from a checkpoint; the names of the encoder's tensors may have a prefix."""
    base = "roberta." if config.is_roberta else "bert."
    prefix = base if any(name.startswith(base) for name in weights.names) else ""
    hidden = config.hidden_size
    for unused in (r".*position_ids", r"(bert\.|roberta\.)?pooler\..*", r"(cls|lm_head)\..*"):
        weights.ignore(unused)

    def norm(name: str) -> Norm:
        weight = weights.tensor(f"{prefix}{name}.LayerNorm.weight", hidden)
        bias = weights.tensor(f"{prefix}{name}.LayerNorm.bias", hidden)
        return lambda x: functional.layer_norm(x, (hidden,), weight, bias, config.layer_norm_eps)

    def table(name: str, num_rows: int) -> torch.Tensor:
        return weights.tensor(f"{prefix}embeddings.{name}_embeddings.weight", num_rows, hidden)

    def layer(index: int) -> _Layer:
        name = f"encoder.layer.{index}"
        own = f"{prefix}{name}"
        inner = config.intermediate_size
        return _Layer(
            qkv=weights.linear(
                hidden,
                *((f"{own}.attention.self.{part}", hidden) for part in ("query", "key", "value")),
                bias=True,
            ),
            attention_out=weights.linear(
                hidden, (f"{own}.attention.output.dense", hidden), bias=True
            ),
            attention_norm=norm(f"{name}.attention.output"),
            up=weights.linear(hidden, (f"{own}.intermediate.dense", inner), bias=True),
            activation=ACTIVATIONS[config.activation],
            down=weights.linear(inner, (f"{own}.output.dense", hidden), bias=True),
            norm=norm(f"{name}.output"),
        )

    def head() -> tuple[Linear, Linear]:
        names = (f"{prefix}pooler.dense", "classifier")
        if config.is_roberta:
            names = ("classifier.dense", "classifier.out_proj")
        return (
            weights.linear(hidden, (names[0], hidden), bias=True),
            weights.linear(hidden, (names[1], 1), bias=True),
        )

    return Bert(
        config=config,
        words=table("word", config.vocab_size),
        positions=table("position", config.num_positions),
        token_types=table("token_type", config.num_token_types),
        norm=norm("embeddings"),
        layers=tuple(map(layer, range(config.num_encoder_layers))),
        head=head() if config.has_head else None,
    )
