"""Encoders of BERT's shape: BERT, RoBERTa, XLM-RoBERTa; alone, or with a classification head.

A token attends to all tokens of its sequence, so a prompt is computed as a whole, and its KV is not
kept.

Symbols: `T` tokens, `N` tokens whose final hidden states are wanted, `P` sequences to score, `H`
heads, `D` head dim, `E` hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final

import torch
from torch.nn import functional

from gpu_worker.models.attention import AttentionMetadata
from gpu_worker.models.config import ModelConfig, read_architecture, read_dtype
from gpu_worker.weights.json_fields import JsonFields
from gpu_worker.weights.linear import Linear
from gpu_worker.weights.reader import Weights

_SCORES: Final = "ForSequenceClassification"
_ROBERTAS: Final = ("Roberta", "XLMRoberta", "Camembert")
BERT_ARCHITECTURES: Final = tuple(
    f"{family}{head}" for family in ("Bert", *_ROBERTAS) for head in ("Model", _SCORES)
)
_ACTIVATIONS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig(ModelConfig):
    """Adds an encoder's fields to `ModelConfig`. An encoder has no layers with KV."""

    hidden_size: int
    intermediate_size: int
    num_encoder_layers: int
    num_heads: int
    num_positions: int
    first_position: int
    """The row of the position embeddings for the first token."""
    num_token_types: int
    layer_norm_eps: float
    activation: str

    @property
    def is_roberta(self) -> bool:
        return not self.architecture.startswith("Bert")

    @property
    def has_head(self) -> bool:
        return self.architecture.endswith(_SCORES)


def read_bert_config(fields: JsonFields) -> BertConfig:
    """Parse config.json.

    Raises:
        ModelError: A field is missing, malformed, or asks for something unsupported.
    """
    architecture = read_architecture(fields)
    hidden, num_heads = (
        fields.positive_int("hidden_size"),
        fields.positive_int("num_attention_heads"),
    )
    if hidden % num_heads:
        raise fields.error("num_attention_heads", f"must divide hidden_size, {hidden}")
    activation = fields.get("hidden_act", default="gelu")
    if activation not in _ACTIVATIONS:
        raise fields.error("hidden_act", f"is {activation!r}; supported: {', '.join(_ACTIVATIONS)}")
    positions = fields.get("position_embedding_type", default="absolute")
    if positions != "absolute":
        raise fields.error("position_embedding_type", f"is {positions!r}; supported: absolute")
    if fields.boolean("is_decoder", default=False):
        raise fields.error("is_decoder", "is true; only encoders are supported")
    num_labels = len(fields.nested("id2label").values) or 2
    if architecture.endswith(_SCORES) and num_labels != 1:
        raise fields.error("id2label", f"has {num_labels} labels; a model that scores must have 1")
    num_positions = fields.positive_int("max_position_embeddings")
    first = 0
    if not architecture.startswith("Bert"):
        padding = fields.int_list("pad_token_id")  # positions up to this one are for padding
        first = 1 + (padding[0] if padding else 1)
    return BertConfig(
        architecture=architecture,
        vocab_size=fields.positive_int("vocab_size"),
        max_model_len=num_positions - first,
        num_layers=0,
        num_kv_heads=num_heads,
        head_dim=hidden // num_heads,
        eos_token_ids=(),
        dtype=read_dtype(fields),
        hidden_size=hidden,
        intermediate_size=fields.positive_int("intermediate_size"),
        num_encoder_layers=fields.positive_int("num_hidden_layers"),
        num_heads=num_heads,
        num_positions=num_positions,
        first_position=first,
        num_token_types=fields.positive_int("type_vocab_size", default=2),
        layer_norm_eps=fields.number("layer_norm_eps", default=1e-12),
        activation=str(activation),
    )


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
    """An encoder. Immutable. Callers are in `torch.inference_mode()`."""

    config: BertConfig
    words: torch.Tensor
    positions: torch.Tensor
    token_types: torch.Tensor
    norm: Norm
    layers: tuple[_Layer, ...]
    head: tuple[Linear, Linear] | None
    """E to E, and E to the score; None: the model makes no scores."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        pool: Any,  # noqa: ARG002 - an encoder keeps no KV
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Compute whole sequences: the final hidden states `[N, E]` of the wanted tokens."""
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
        """Map the hidden states of first tokens, `[P, E]`, to scores, `[P, 1]`."""
        assert self.head is not None, "only a model with a head is asked for scores"
        dense, out = self.head
        return out(dense(hidden).tanh())


def build_bert(config: BertConfig, weights: Weights) -> Bert:
    """Build the model from a checkpoint, in which tensors of the encoder may have a prefix."""
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
            activation=_ACTIVATIONS[config.activation],
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
