"""The decoder with layer norms.

In some models the feed-forward part is parallel to attention: both take the layer's input.

Symbols: `T` tokens, `S` sequences, `H` query heads, `HKV` kv heads, `D` head dim, `R` rotated
dimensions of a head, `E` hidden size, `I` intermediate size, `V` vocabulary.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from gpu_worker.kv.device_pool import KvPool
from gpu_worker.models.activations import ACTIVATIONS, Activation
from gpu_worker.models.attention import AttentionMetadata, attend, rotary_store_kv
from gpu_worker.models.decoder_layer import AdaptableLayer
from gpu_worker.models.feed_forward import FeedForward, build_gated_mlp
from gpu_worker.models.layer_norm.config import LayerNormConfig, split_layer_norm_config
from gpu_worker.models.rope_table import rotary_table
from gpu_worker.ranks.collectives import Ranks
from gpu_worker.weights.linear import Linear
from gpu_worker.weights.reader import Weights


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
class HeadNorm:
    """A layer norm of each head, without bias."""

    weight: torch.Tensor
    """float32 `[H, D]`."""
    eps: float

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """`[T, H, D]` to `[T, H, D]`."""
        normed = functional.layer_norm(heads.float(), self.weight.shape[1:], eps=self.eps)
        return (normed * self.weight).to(heads.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """A feed-forward part without a gate."""

    up: Linear
    """E to I."""
    activation: Activation
    down: Linear
    """I to E."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, E]` to `[T, E]`."""
        return self.down(self.activation(self.up(x)))


@dataclass(frozen=True, slots=True, eq=False)
class Layer(AdaptableLayer):
    """The weights of one layer."""

    attention_norm: LayerNorm
    qk_norms: tuple[HeadNorm, HeadNorm] | None
    """The norms of queries and of keys, before rotation."""
    mlp_norm: LayerNorm | None
    """None: `attention_norm`."""
    window: int | None
    """Number of tokens that a token sees, itself included; None: all tokens up to itself."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerNormDecoder:
    """A language model. Immutable. Call it in `torch.inference_mode()`."""

    config: LayerNormConfig
    """The config of this rank's part, if the model is on several devices."""
    embedding: torch.Tensor | None
    """`[V, E]`; None if an earlier stage has it."""
    layers: tuple[Layer, ...]
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
        for index, plain_layer in enumerate(self.layers):
            layer = metadata.adapted(index, plain_layer)
            normed = layer.attention_norm(x)
            query = self._store(index, layer, normed, positions, pool, metadata)
            if wanted is not None and index == len(self.layers) - 1:
                query, x, normed = map(metadata.select, (query, x, normed))
                metadata = wanted.metadata
                if not len(query):
                    return x
                layer = metadata.adapted(index, plain_layer)
            scale, window = self.config.head_dim**-0.5, layer.window
            attended = layer.attention_output(
                attend(query, pool, index, metadata, scale, window=window)
            )
            total = x + attended
            if layer.mlp_norm is not None:
                normed = layer.mlp_norm(x if self.config.is_parallel else total)
            x = total + layer.feed_forward(normed)
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
        layer: Layer,
        normed: torch.Tensor,  # [T, E]
        positions: torch.Tensor,
        pool: KvPool,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Store the tokens' K and V; return their rotated queries, `[T, H, D]`."""
        config, mapped = self.config, layer.qkv(normed)
        if len(config.names.qkv) == 1:
            by_head = mapped.view(-1, config.num_heads, 3, config.head_dim)
            query, key, value = by_head.unbind(2)  # [T, H, D] each
        else:
            counts = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
            heads = mapped.view(-1, sum(counts), config.head_dim)
            query, key, value = torch.split(heads, counts, dim=1)
        if layer.qk_norms is not None:
            norm_query, norm_key = layer.qk_norms
            query, key = norm_query(query), norm_key(key)
        return rotary_store_kv(query, key, value, self.cos_sin, positions, pool, index, metadata)


def build_layer_norm_decoder(config: LayerNormConfig, weights: Weights) -> LayerNormDecoder:
    """Build this rank's part of the decoder; `weights.place` says which part."""
    # Old checkpoints also contain masks and frequencies, which are not weights.
    weights.ignore(r".*\.(attention\.(bias|masked_bias)|rotary_emb\.inv_freq)")
    if config.tie_word_embeddings:
        weights.ignore(r"(embed_out|lm_head)\.weight")
    place, names, vocab_size = weights.place, config.names, config.vocab_size
    embedding = final_norm = lm_head = None
    if place.is_first_stage:
        embedding = weights.tensor(f"{names.embedding}.weight", vocab_size, config.hidden_size)
    layers = tuple(_layer(config, index, weights) for index in place.layers(config.num_layers))
    if place.is_last_stage:
        final_norm = _norm(config, names.final_norm, weights)
        tied = embedding if config.tie_word_embeddings else None
        name = _head_name(config, weights)
        lm_head = weights.split_head(name, vocab_size, config.hidden_size, tied)
    return LayerNormDecoder(
        config=split_layer_norm_config(config, place),
        embedding=embedding,
        layers=layers,
        final_norm=final_norm,
        lm_head=lm_head,
        cos_sin=rotary_table(config.rope, config.rotary_dim, config.max_model_len).to(
            weights.device
        ),
        ranks=weights.ranks,
    )


def _head_name(config: LayerNormConfig, weights: Weights) -> str:
    """Return the name of the weight that maps hidden states to the vocabulary."""
    names, name = config.names, "lm_head.weight"
    if config.tie_word_embeddings:
        return f"{names.embedding}.weight"
    if names.old_head is not None and name not in weights.names:
        return f"{names.old_head}.weight"
    return name


def _layer(config: LayerNormConfig, index: int, weights: Weights) -> Layer:
    hidden, head_dim, names = config.hidden_size, config.head_dim, config.names
    layer = f"{names.layers}.{index}"
    attention = f"{layer}.{names.attention}"
    output = f"{attention}.{names.output}", hidden
    return Layer(
        attention_norm=_norm(config, f"{layer}.input_layernorm", weights),
        qkv=_qkv(config, attention, weights),
        qk_norms=_qk_norms(config, attention, weights) if config.has_qk_norm else None,
        attention_output=weights.summed(
            weights.split_inputs(config.num_heads, head_dim, output, bias=config.output_bias)
        ),
        mlp_norm=_norm(config, f"{layer}.post_attention_layernorm", weights)
        if config.has_mlp_norm
        else None,
        feed_forward=weights.summed(_mlp(config, f"{layer}.mlp", weights)),
        window=config.windows[index],
    )


def _qkv(config: LayerNormConfig, attention: str, weights: Weights) -> Linear:
    names, head_dim = config.names.qkv, config.head_dim
    if len(names) == 1:
        parts = [(f"{attention}.{names[0]}", config.num_heads, 3 * head_dim)]
    else:
        counts = config.num_heads, config.num_kv_heads, config.num_kv_heads
        modules = (f"{attention}.{name}" for name in names)
        parts = [(module, count, head_dim) for module, count in zip(modules, counts, strict=True)]
    return weights.split_outputs(config.hidden_size, *parts, bias=config.qkv_bias)


def _qk_norms(
    config: LayerNormConfig, attention: str, weights: Weights
) -> tuple[HeadNorm, HeadNorm]:
    def norm(module: str, num_heads: int) -> HeadNorm:
        of_heads = [
            weights.tensor(f"{module}.norms.{head}.weight", config.head_dim, dtype=torch.float32)
            for head in weights.place.groups(num_heads)
        ]
        return HeadNorm(torch.stack(of_heads), config.layer_norm_eps)

    return (
        norm(f"{attention}.q_layernorm", config.num_heads),
        norm(f"{attention}.k_layernorm", config.num_kv_heads),
    )


def _mlp(config: LayerNormConfig, mlp: str, weights: Weights) -> FeedForward:
    """Build this rank's share of a feed-forward part; the caller sums the ranks' results."""
    hidden, size, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    if config.is_gated:
        return build_gated_mlp(hidden, size, mlp, weights, bias=bias)
    up, down = f"{mlp}.{config.names.up}", f"{mlp}.{config.names.down}"
    return Mlp(
        up=weights.split_outputs(hidden, (up, size, 1), bias=bias),
        activation=ACTIVATIONS[config.activation],
        down=weights.split_inputs(size, 1, (down, hidden), bias=bias),
    )


def _norm(config: LayerNormConfig, name: str, weights: Weights) -> LayerNorm:
    size = config.hidden_size
    weight = weights.tensor(f"{name}.weight", size)
    return LayerNorm(
        weight + 1 if config.adds_one_to_norms else weight,
        weights.tensor(f"{name}.bias", size),
        config.layer_norm_eps,
    )
