"""Multi-head latent attention (https://arxiv.org/abs/2405.04434): the pool stores only latents.

A token's latent is a short vector, from which linear maps compute the token's keys and values. A
head's key is a linear map `U` of the latent `c`, so `q . (U c) = (U^T q) . c`. Queries are mapped
to the latent's space and attend to latents, which are the keys and values of one kv head. The
result of attention is mapped to the head's values.

Prefill and decode do the same computations in the same order, so no result depends on how a prompt
is split into chunks.

Symbols: `T` tokens, `N` tokens whose final hidden states are wanted, `H` heads, `E` hidden size,
`Q` query rank, `L` width of the latent, `D` dimensions of a head's queries and keys that are not
rotated, `R` those that are, `V` dimensions of a head's values.
"""

from dataclasses import dataclass
from typing import Final

import torch

from gpu_worker.kv.device_pool import KvPool
from gpu_worker.models.attention import AttentionMetadata, attend, store_kv
from gpu_worker.models.deepseek.config import DeepseekConfig, split_deepseek_config
from gpu_worker.weights.linear import HeadMaps, Linear, make_head_maps
from gpu_worker.weights.reader import Weights
from kernels import ops

_EPS: Final = 1e-6
"""Epsilon of the norms of query and latent, for all of `DEEPSEEK_ARCHITECTURES`."""


@dataclass(frozen=True, slots=True, eq=False)
class RankedQuery:
    """The map from hidden states to queries: down to the query rank, a norm, and up."""

    down: Linear
    """E to Q."""
    norm: torch.Tensor
    """`[Q]`."""
    up: Linear
    """Q to H * (D + R)."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, E]` to `[T, H * (D + R)]`."""
        return self.up(ops.rms_norm(self.down(x), self.norm, _EPS))


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttention:
    """The weights of one layer's attention. Immutable."""

    config: DeepseekConfig
    query: Linear
    """E to H * (D + R)."""
    latent: Linear
    """E to L + R: the latent, and the key that all heads share, before rotation."""
    latent_norm: torch.Tensor
    """`[L]`."""
    to_latent: HeadMaps
    """By head, D to L: the transposed map from latents to keys."""
    to_value: HeadMaps
    """By head, L to V."""
    output: Linear
    """H * V to E."""

    def store(
        self,
        x: torch.Tensor,  # [T, E]
        cos_sin: torch.Tensor,  # float32 [max_model_len, R]
        positions: torch.Tensor,  # int64[T]
        pool: KvPool,
        layer: int,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Store the tokens' latents; return the queries in the latent's space, `[T, H, L + R]`.

        For each token the pool stores the normalized latent, then the rotated key that all heads
        share.
        """
        config, width = self.config, self.config.latent_dim
        query = self.query(x).view(len(x), config.num_heads, -1)
        latent = self.latent(x)
        rotated, shared_key = ops.rotary(
            self._paired(query[..., config.plain_dim :]),
            self._paired(latent[:, width:]).unsqueeze(1),
            cos_sin,
            positions,
        )
        row = torch.cat(
            (ops.rms_norm(latent[:, :width], self.latent_norm, _EPS), shared_key[:, 0]), 1
        )
        store_kv(row.unsqueeze(1), None, pool, layer, metadata)
        absorbed = query.new_empty(*query.shape[:2], config.head_dim)
        self.to_latent(query[..., : config.plain_dim], absorbed[..., :width])
        absorbed[..., width:] = rotated
        return absorbed

    def attend(
        self,
        query: torch.Tensor,  # [N, H, L + R]
        pool: KvPool,
        layer: int,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Attend to the stored latents; return `[N, E]`."""
        config = self.config
        latents = attend(query, pool, layer, metadata, config.attention_scale)
        values = query.new_empty(len(query), config.num_heads, config.value_dim)
        self.to_value(latents.view(len(query), config.num_heads, config.latent_dim), values)
        return self.output(values.flatten(1))

    def _paired(self, x: torch.Tensor) -> torch.Tensor:
        """Reorder R dimensions for `rotary`, which pairs dimension i of both halves.

        If the model pairs neighbouring dimensions, the first of each pair goes to the first half,
        and the second to the second half.
        """
        if not self.config.is_interleaved:
            return x
        return x.reshape(*x.shape[:-1], -1, 2).mT.flatten(-2)


def build_attention(config: DeepseekConfig, module: str, weights: Weights) -> LatentAttention:
    """Build this rank's part of a layer's attention."""
    hidden, heads, bias = config.hidden_size, config.num_heads, config.attention_bias
    query_size, key_value_dim = (
        config.plain_dim + config.rotary_dim,
        config.plain_dim + config.value_dim,
    )
    if config.query_rank is None:
        query: Linear = weights.split_outputs(hidden, (f"{module}.q_proj", heads, query_size))
    else:
        query = RankedQuery(
            down=weights.linear(hidden, (f"{module}.q_a_proj", config.query_rank), bias=bias),
            norm=weights.tensor(f"{module}.q_a_layernorm.weight", config.query_rank),
            up=weights.split_outputs(config.query_rank, (f"{module}.q_b_proj", heads, query_size)),
        )
    of_heads = weights.dense_share(
        f"{module}.kv_b_proj", heads, key_value_dim, config.latent_dim
    ).view(-1, key_value_dim, config.latent_dim)
    output = f"{module}.o_proj", hidden
    return LatentAttention(
        config=split_deepseek_config(config, weights.place),
        query=query,
        latent=weights.linear(hidden, (f"{module}.kv_a_proj_with_mqa", config.head_dim), bias=bias),
        latent_norm=weights.tensor(f"{module}.kv_a_layernorm.weight", config.latent_dim),
        to_latent=make_head_maps(of_heads[:, : config.plain_dim].mT),
        to_value=make_head_maps(of_heads[:, config.plain_dim :]),
        output=weights.summed(weights.split_inputs(heads, config.value_dim, output, bias=bias)),
    )
