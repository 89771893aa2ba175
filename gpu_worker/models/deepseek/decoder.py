"""The decoder of models with multi-head latent attention, with or without experts.

Symbols: `T` tokens, `N` tokens whose final hidden states are wanted, `S` sequences, `E` hidden
size, `V` vocabulary.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from gpu_worker.kv.device_pool import KvPool
from gpu_worker.models.attention import AttentionMetadata
from gpu_worker.models.deepseek.attention import LatentAttention, build_attention
from gpu_worker.models.deepseek.config import DeepseekConfig, split_deepseek_config
from gpu_worker.models.experts.build import build_experts
from gpu_worker.models.feed_forward import FeedForward, build_gated_mlp
from gpu_worker.models.rope_table import rotary_table
from gpu_worker.ranks.collectives import Ranks
from gpu_worker.weights.linear import Linear
from gpu_worker.weights.reader import Weights
from kernels import ops
from kernels.cpu.linear import PackedLinear

_EMBEDDING: Final = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, eq=False)
class DeepseekLayer:
    """The weights of one layer."""

    input_norm: torch.Tensor
    """`[E]`, before attention."""
    attention: LatentAttention
    mlp_norm: torch.Tensor
    """`[E]`, before the feed-forward part."""
    feed_forward: FeedForward


@dataclass(frozen=True, slots=True, eq=False)
class DeepseekDecoder:
    """A language model. Immutable. Call it in `torch.inference_mode()`."""

    config: DeepseekConfig
    """The config of this rank's part, if the model is on several devices."""
    embedding: torch.Tensor | None
    """`[V, E]`; None if an earlier stage has it."""
    layers: tuple[DeepseekLayer, ...]
    final_norm: torch.Tensor | None
    """`[E]`; None if a later stage has it."""
    lm_head: Linear | None
    """E to V; None if a later stage has it."""
    cos_sin: torch.Tensor
    """float32 `[max_model_len, rotary_dim]`, from `rotary_table`."""
    ranks: Ranks | None = None
    """The other devices, if any."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        pool: KvPool,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Compute a step's tokens, and store their latents; see `LlamaDecoder.forward`."""
        eps = self.config.rms_norm_eps
        if self.embedding is None:
            residual = self._others.receive(len(token_ids), self.layers[0].input_norm)
        else:
            residual = functional.embedding(token_ids, self.embedding)
            if self.config.embedding_scale != 1:
                residual = residual * self.config.embedding_scale
        wanted = None if self.final_norm is None else metadata.wanted
        out: torch.Tensor | None = None  # output of a branch; the next norm adds it
        for index, layer in enumerate(self.layers):
            if out is None:
                normed = ops.rms_norm(residual, layer.input_norm, eps)
            else:
                normed, residual = ops.add_rms_norm(out, residual, layer.input_norm, eps)
            query = layer.attention.store(normed, self.cos_sin, positions, pool, index, metadata)
            if wanted is not None and index == len(self.layers) - 1:
                query, residual = metadata.select(query), metadata.select(residual)
                metadata = wanted.metadata
                if not len(query):
                    return residual
            out = self._scaled(layer.attention.attend(query, pool, index, metadata))
            normed, residual = ops.add_rms_norm(out, residual, layer.mlp_norm, eps)
            out = self._scaled(layer.feed_forward(normed))
        assert out is not None, "a decoder has at least one layer"
        if self.final_norm is None:
            hidden = residual + out
            self._others.send_on(hidden)
            return metadata.select(hidden)
        return ops.add_rms_norm(out, residual, self.final_norm, eps)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `LlamaDecoder.logits`."""
        if self.lm_head is None:
            return hidden[:, :0].float()
        if self.config.logits_scale != 1:
            hidden = hidden * self.config.logits_scale
        if isinstance(self.lm_head, PackedLinear):
            return self.lm_head(hidden, torch.float32)
        logits = self.lm_head(hidden)
        # GPUs sample from logits of 16 bits, too.
        return logits if logits.is_cuda else logits.float()

    @property
    def _others(self) -> Ranks:
        assert self.ranks is not None, "a stage of a pipeline has ranks"
        return self.ranks

    def _scaled(self, branch: torch.Tensor) -> torch.Tensor:
        return branch if self.config.residual_scale == 1 else branch * self.config.residual_scale


def build_deepseek(config: DeepseekConfig, weights: Weights) -> DeepseekDecoder:
    """Build this rank's part of the decoder; `weights.place` says which part."""
    vocab_size, hidden, place = config.vocab_size, config.hidden_size, weights.place
    weights.ignore(r".*\.rotary_emb\.inv_freq")  # in old checkpoints
    # Layers that predict further tokens.
    weights.ignore(rf"model\.layers\.{config.num_layers}\..*")
    if config.tie_word_embeddings:
        weights.ignore(r"lm_head\.weight")  # a copy of the embedding, in some checkpoints
    embedding = final_norm = lm_head = None
    if place.is_first_stage:
        embedding = weights.tensor(_EMBEDDING, vocab_size, hidden)
    layers = tuple(_layer(config, index, weights) for index in place.layers(config.num_layers))
    if place.is_last_stage:
        final_norm = weights.tensor("model.norm.weight", hidden)
        name = _EMBEDDING if config.tie_word_embeddings else "lm_head.weight"
        tied = embedding if config.tie_word_embeddings else None
        lm_head = weights.split_head(name, vocab_size, hidden, tied)
    return DeepseekDecoder(
        config=split_deepseek_config(config, place),
        embedding=embedding,
        layers=layers,
        final_norm=final_norm,
        lm_head=lm_head,
        cos_sin=rotary_table(config.rope, config.rotary_dim, config.max_model_len).to(
            weights.device
        ),
        ranks=weights.ranks,
    )


def _layer(config: DeepseekConfig, index: int, weights: Weights) -> DeepseekLayer:
    hidden, layer = config.hidden_size, f"model.layers.{index}"
    if config.experts is not None and config.experts.layers[index]:
        feed_forward = build_experts(config.experts, hidden, layer, weights)
    else:
        feed_forward = build_gated_mlp(hidden, config.intermediate_size, f"{layer}.mlp", weights)
    return DeepseekLayer(
        input_norm=weights.tensor(f"{layer}.input_layernorm.weight", hidden),
        attention=build_attention(config, f"{layer}.self_attn", weights),
        mlp_norm=weights.tensor(f"{layer}.post_attention_layernorm.weight", hidden),
        feed_forward=weights.summed(feed_forward),
    )
