"""GPT-NeoX: layer norms have biases; attention and feed-forward part may run in parallel.

Symbols: `T` tokens, `S` sequences, `H` heads, `D` head dim, `R` rotated dimensions of a head,
`E` hidden size, `I` intermediate size, `V` vocabulary.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from gpu_worker.kv.device_pool import KvPool
from gpu_worker.models.activations import ACTIVATIONS, Activation
from gpu_worker.models.attention import AttentionMetadata, attend, rotary_store_kv
from gpu_worker.models.neox.config import NeoxConfig, split_neox_config
from gpu_worker.models.rope_table import rotary_table
from gpu_worker.ranks.collectives import Ranks
from gpu_worker.weights.linear import Linear
from gpu_worker.weights.reader import Weights

_EMBEDDING: Final = "gpt_neox.embed_in.weight"


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """`(x - mean) / sqrt(variance + eps) * weight + bias`."""

    weight: torch.Tensor
    """`[E]`."""
    bias: torch.Tensor
    """`[E]`."""
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, E]` to `[T, E]`."""
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """The feed-forward part."""

    up: Linear
    """E to I."""
    activation: Activation
    down: Linear
    """I to E."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, E]` to `[T, E]`."""
        return self.down(self.activation(self.up(x)))


@dataclass(frozen=True, slots=True, eq=False)
class NeoxLayer:
    """The weights of one layer."""

    attention_norm: LayerNorm
    qkv: Linear
    """E to H * 3 * D: by head, query, key and value."""
    attention_output: Linear
    """H * D to E."""
    mlp_norm: LayerNorm
    mlp: Linear
    """E to E: an `Mlp`, or on several devices the sum of the devices' parts."""


@dataclass(frozen=True, slots=True, eq=False)
class NeoxDecoder:
    """A language model. Immutable. Call it in `torch.inference_mode()`."""

    config: NeoxConfig
    """The config of this rank's part, if the model is on several devices."""
    embedding: torch.Tensor | None
    """`[V, E]`; None if an earlier stage has it."""
    layers: tuple[NeoxLayer, ...]
    final_norm: LayerNorm | None
    """None if a later stage has it."""
    lm_head: Linear | None
    """E to V; None if a later stage has it."""
    cos_sin: torch.Tensor
    """float32 `[max_model_len, R]`, from `rotary_table`."""
    ranks: Ranks | None = None
    """The other devices, if any."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        pool: KvPool,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Compute a step's tokens; see `LlamaDecoder.forward`."""
        if self.embedding is None:
            x = self._others.receive(len(token_ids), self.layers[0].attention_norm.weight)
        else:
            x = functional.embedding(token_ids, self.embedding)
        wanted = None if self.final_norm is None else metadata.wanted
        for index, layer in enumerate(self.layers):
            query = self._store(index, layer, x, positions, pool, metadata)
            if wanted is not None and index == len(self.layers) - 1:
                query, x = metadata.select(query), metadata.select(x)
                metadata = wanted.metadata
                if not len(query):
                    return x
            attended = layer.attention_output(
                attend(query, pool, index, metadata, self.config.head_dim**-0.5)
            )
            if self.config.is_parallel:
                x = x + attended + layer.mlp(layer.mlp_norm(x))
            else:
                x = x + attended
                x = x + layer.mlp(layer.mlp_norm(x))
        if self.final_norm is None:
            self._others.send_on(x)
            return metadata.select(x)
        return self.final_norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `LlamaDecoder.logits`."""
        if self.lm_head is None:
            return hidden[:, :0].float()
        return self.lm_head(hidden).float()

    @property
    def _others(self) -> Ranks:
        assert self.ranks is not None, "a stage of a pipeline has ranks"
        return self.ranks

    def _store(
        self,
        index: int,
        layer: NeoxLayer,
        x: torch.Tensor,  # [T, E]
        positions: torch.Tensor,
        pool: KvPool,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Store the tokens' K and V; return their rotated queries, `[T, H, D]`."""
        config = self.config
        heads = layer.qkv(layer.attention_norm(x)).view(-1, config.num_kv_heads, 3, config.head_dim)
        query, key, value = heads.unbind(2)  # [T, H, D] each
        return rotary_store_kv(query, key, value, self.cos_sin, positions, pool, index, metadata)


def build_neox(config: NeoxConfig, weights: Weights) -> NeoxDecoder:
    """Build the part of the decoder for `weights.place`; errors of reading tensors pass through."""
    # Old checkpoints also contain masks and frequencies, which are not weights.
    weights.ignore(r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)")
    if config.tie_word_embeddings:
        weights.ignore(r"(embed_out|lm_head)\.weight")
    place = weights.place
    embedding = final_norm = lm_head = None
    if place.is_first_stage:
        embedding = weights.tensor(_EMBEDDING, config.vocab_size, config.hidden_size)
    layers = tuple(_layer(config, index, weights) for index in place.layers(config.num_layers))
    if place.is_last_stage:
        final_norm = _norm(config, "gpt_neox.final_layer_norm", weights)
        tied = embedding if config.tie_word_embeddings else None
        name = _head_name(config, weights)
        lm_head = weights.split_head(name, config.vocab_size, config.hidden_size, tied)
    return NeoxDecoder(
        config=split_neox_config(config, place),
        embedding=embedding,
        layers=layers,
        final_norm=final_norm,
        lm_head=lm_head,
        cos_sin=rotary_table(config.rope, config.rotary_dim, config.max_model_len).to(
            weights.device
        ),
        ranks=weights.ranks,
    )


def _head_name(config: NeoxConfig, weights: Weights) -> str:
    """Return the name of the weight of the map to the vocabulary."""
    if config.tie_word_embeddings:
        return _EMBEDDING
    # Versions before transformers 5 call it embed_out.
    return "lm_head.weight" if "lm_head.weight" in weights.names else "embed_out.weight"


def _layer(config: NeoxConfig, index: int, weights: Weights) -> NeoxLayer:
    layer, hidden, inner = f"gpt_neox.layers.{index}", config.hidden_size, config.intermediate_size
    attention, mlp = f"{layer}.attention", f"{layer}.mlp"
    heads, head_dim, bias = config.num_kv_heads, config.head_dim, config.attention_bias
    mlp_part = Mlp(
        up=weights.split_outputs(hidden, (f"{mlp}.dense_h_to_4h", inner, 1), bias=True),
        activation=ACTIVATIONS[config.activation],
        down=weights.split_inputs(inner, 1, (f"{mlp}.dense_4h_to_h", hidden), bias=True),
    )
    return NeoxLayer(
        attention_norm=_norm(config, f"{layer}.input_layernorm", weights),
        qkv=weights.split_outputs(
            hidden, (f"{attention}.query_key_value", heads, 3 * head_dim), bias=bias
        ),
        attention_output=weights.summed(
            weights.split_inputs(heads, head_dim, (f"{attention}.dense", hidden), bias=bias)
        ),
        mlp_norm=_norm(config, f"{layer}.post_attention_layernorm", weights),
        mlp=weights.summed(mlp_part),
    )


def _norm(config: NeoxConfig, name: str, weights: Weights) -> LayerNorm:
    size = config.hidden_size
    return LayerNorm(
        weights.tensor(f"{name}.weight", size),
        weights.tensor(f"{name}.bias", size),
        config.layer_norm_eps,
    )
