"""GPT-NeoX: layer norms with biases, attention and feed-forward part side by side.

Symbols: `T` tokens, `S` sequences, `H` heads, `D` head dim, `R` of its dimensions that are rotated,
`E` hidden size, `I` intermediate size, `V` vocabulary.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from gpu_worker.attention import AttentionMetadata, paged_attention
from gpu_worker.kv_pool import KvPool
from gpu_worker.models.activation import Activation
from gpu_worker.models.linear import Linear
from gpu_worker.models.neox_config import NeoxConfig
from gpu_worker.models.rope import rotary_table
from gpu_worker.weights import Weights
from kernels import ops


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
    """E to H * 3 * D: of each head its query, key and value."""
    attention_output: Linear
    """H * D to E."""
    mlp_norm: LayerNorm
    mlp: Mlp


@dataclass(frozen=True, slots=True, eq=False)
class NeoxDecoder:
    """A language model; it never changes. Callers are in `torch.inference_mode()`."""

    config: NeoxConfig
    embedding: torch.Tensor
    """`[V, E]`."""
    layers: tuple[NeoxLayer, ...]
    final_norm: LayerNorm
    lm_head: Linear
    """E to V."""
    cos_sin: torch.Tensor
    """float32 `[max_model_len, R]`, as `rotary_table` makes it."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        pool: KvPool,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Compute one step's tokens; the contract is that of `Decoder.forward`."""
        x = functional.embedding(token_ids, self.embedding)
        for index, layer in enumerate(self.layers):
            attended = self._attend(index, layer, x, positions, pool, metadata)
            if self.config.is_parallel:
                x = x + attended + layer.mlp(layer.mlp_norm(x))
            else:
                x = x + attended
                x = x + layer.mlp(layer.mlp_norm(x))
        return self.final_norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Score the token after each of some final hidden states `[S, E]`; float32 `[S, V]`."""
        return self.lm_head(hidden).float()

    def _attend(
        self,
        index: int,
        layer: NeoxLayer,
        x: torch.Tensor,  # [T, E]
        positions: torch.Tensor,
        pool: KvPool,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:  # [T, E]
        config = self.config
        heads = layer.qkv(layer.attention_norm(x)).view(-1, config.num_kv_heads, 3, config.head_dim)
        query, key, value = heads.unbind(2)  # [T, H, D] each
        rotated = config.rotary_dim
        query_part, key_part = ops.rotary(
            query[..., :rotated], key[..., :rotated], self.cos_sin, positions
        )
        if rotated < config.head_dim:
            query_part = torch.cat((query_part, query[..., rotated:]), dim=-1)
            key_part = torch.cat((key_part, key[..., rotated:]), dim=-1)
        scale = config.head_dim**-0.5
        return layer.attention_output(
            paged_attention(query_part, key_part, value, pool, index, metadata, scale)
        )


def build_neox(config: NeoxConfig, weights: Weights) -> NeoxDecoder:
    """Build the decoder; raises what reading its tensors does."""
    # In old checkpoints, masks and frequencies that are no weights.
    weights.ignore(r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)")
    embedding = weights.tensor("gpt_neox.embed_in.weight", config.vocab_size, config.hidden_size)
    if config.tie_word_embeddings:
        weights.ignore(r"(embed_out|lm_head)\.weight")
        head = embedding
    else:
        # transformers before 5 calls it embed_out.
        name = "lm_head" if "lm_head.weight" in weights.names else "embed_out"
        head = weights.tensor(f"{name}.weight", config.vocab_size, config.hidden_size)
    return NeoxDecoder(
        config=config,
        embedding=embedding,
        layers=tuple(_layer(config, index, weights) for index in range(config.num_layers)),
        final_norm=_norm(config, "gpt_neox.final_layer_norm", weights),
        lm_head=weights.head(head),
        cos_sin=rotary_table(config.rope, config.rotary_dim, config.max_model_len).to(
            weights.device
        ),
    )


def _layer(config: NeoxConfig, index: int, weights: Weights) -> NeoxLayer:
    layer, hidden, inner = f"gpt_neox.layers.{index}", config.hidden_size, config.intermediate_size
    attention, mlp = f"{layer}.attention", f"{layer}.mlp"
    bias = config.attention_bias
    return NeoxLayer(
        attention_norm=_norm(config, f"{layer}.input_layernorm", weights),
        qkv=weights.linear(hidden, (f"{attention}.query_key_value", 3 * hidden), bias=bias),
        attention_output=weights.linear(hidden, (f"{attention}.dense", hidden), bias=bias),
        mlp_norm=_norm(config, f"{layer}.post_attention_layernorm", weights),
        mlp=Mlp(
            up=weights.linear(hidden, (f"{mlp}.dense_h_to_4h", inner), bias=True),
            activation=config.activation,
            down=weights.linear(inner, (f"{mlp}.dense_4h_to_h", hidden), bias=True),
        ),
    )


def _norm(config: NeoxConfig, name: str, weights: Weights) -> LayerNorm:
    size = config.hidden_size
    return LayerNorm(
        weights.tensor(f"{name}.weight", size),
        weights.tensor(f"{name}.bias", size),
        config.layer_norm_eps,
    )
