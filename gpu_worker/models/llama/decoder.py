"""The decoder of the Llama-shaped families, such as Llama, Mistral, Phi-3, Qwen and GLM.

Symbols: `T` tokens, `N` tokens whose final hidden states are wanted, `S` sequences, `H` query
heads, `HKV` kv heads, `D` head dim, `R` rotated dimensions of a head, `E` hidden size, `I`
intermediate size, `V` vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch.nn import functional

from gpu_worker.kv.device_pool import KvPool
from gpu_worker.models.attention import AttentionMetadata, attend, rotary_store_kv
from gpu_worker.models.decoder_layer import DecoderLayer, QkNorm
from gpu_worker.models.experts.build import build_experts
from gpu_worker.models.feed_forward import GATES, FeedForward, GatedMlp, build_gated_mlp
from gpu_worker.models.llama.config import LlamaConfig, split_llama_config
from gpu_worker.models.llama.native_layers import NativeLayers
from gpu_worker.models.rope import RopeConfig
from gpu_worker.models.rope_table import rotary_table
from gpu_worker.ranks.collectives import Ranks
from gpu_worker.weights.linear import Linear
from gpu_worker.weights.reader import Weights
from kernels import ops
from kernels.cpu.linear import PackedLinear
from kernels.cpu.program.inputs import NativeInputs, NativeWanted
from kernels.cpu.program.low_rank import RowAdapters


@dataclass(frozen=True, eq=False)
class LlamaDecoder:
    """A language model. Immutable. Call it in `torch.inference_mode()`."""

    config: LlamaConfig
    """The config of this rank's part, if the model is on several devices."""
    dtype: torch.dtype
    """The dtype of hidden states."""
    embedding: torch.Tensor | None
    """`[V, E]`; None if an earlier stage has it."""
    layers: tuple[DecoderLayer, ...]
    final_norm: torch.Tensor | None
    """`[E]`; None if a later stage has it."""
    lm_head: Linear | None
    """E to V; None if a later stage has it."""
    cos_sin: torch.Tensor
    """float32 `[max_model_len, R]`, from `rotary_table`."""
    windowed_cos_sin: torch.Tensor | None = None
    """The table of the layers with a window. If None, these layers use `cos_sin`, too."""
    half_by_half: torch.Tensor | None = None
    """int64[D]: how to reorder a head's dimensions in a model whose rotation pairs neighbouring
    dimensions; None for other models. `rotary_store_kv` pairs dimension i of the first half with
    dimension i of the second half. So the first dimension of each pair goes to the first half, and
    the second dimension to the second half."""
    embedding_scale: float | None = None
    """Multiplies the embedding of a token; None: it is not scaled."""
    ranks: Ranks | None = None
    """The other devices, if any."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        pool: KvPool,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Compute a step's tokens, and store their K and V in `pool`.

        Args:
            token_ids: int64[T], in the order of `metadata`'s sequences.
            positions: int64[T], each token's index in its sequence, in [0, max_model_len); for
                padding, any value in that range.
            pool: Holds the K and V of all earlier tokens.
            metadata: Where K and V are stored, and the sequences of this step.

        Returns:
            The final, normalized hidden states of `metadata.wanted`, `[N, E]`. A stage before the
            last returns its own hidden states, not normalized.
        """
        if self.embedding is None:
            residual = self._others.receive(len(token_ids), self._like)
        else:
            residual = functional.embedding(token_ids, self.embedding)
            if self.embedding_scale is not None:
                residual = residual * self.embedding_scale
        adapters = metadata.adapters
        native = None
        # Native code uses the same slots and block tables in each layer.
        is_one_group = not metadata.by_group
        if (
            is_one_group
            and self._native is not None
            and (adapters is None or adapters.native is not None)
        ):
            native = self._native.over(pool)
        if native is not None:
            return native.forward(
                NativeInputs(
                    hidden=residual,
                    positions=positions,
                    slot_mapping=metadata.slot_mapping,
                    block_tables=metadata.block_tables,
                    seq_lens=metadata.seq_lens,
                    query_start_loc=metadata.query_start_loc,
                    wanted=_native_wanted(metadata),
                    adapters=None if adapters is None else adapters.native,
                )
            )
        wanted = None if self.final_norm is None else metadata.wanted
        out: torch.Tensor | None = None  # output of a branch; `_add` adds it
        for index, plain_layer in enumerate(self.layers):
            layer = metadata.adapted(index, plain_layer)
            normed, residual = self._add(out, residual, layer.input_norm)
            query = self._store(index, layer, normed, positions, pool, metadata)
            if wanted is not None and index == len(self.layers) - 1:
                query, residual = metadata.select(query), metadata.select(residual)
                metadata = wanted.metadata
                if not len(query):
                    return residual
                layer = metadata.adapted(index, plain_layer)
            attended = attend(
                *(query, pool, index, metadata, self.config.attention_scale),
                window=layer.window,
                softcap=self.config.attention_softcap,
                sinks=layer.sinks,
            )
            out = self._norm(layer.attention_output(attended), layer.attention_output_norm)
            normed, residual = self._add(out, residual, layer.mlp_norm)
            out = self._norm(layer.feed_forward(normed), layer.mlp_output_norm)
        assert out is not None, "a decoder has at least one layer"
        if self.final_norm is None:
            hidden = residual + out
            self._others.send_on(hidden)
            return metadata.select(hidden)
        return self._add(out, residual, self.final_norm)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits of the next token from final hidden states: `[S, E]` to `[S, V]`.

        A stage before the last returns `[S, 0]`.
        """
        if self.lm_head is None:
            return hidden[:, :0].float()
        if isinstance(self.lm_head, PackedLinear):
            logits = self.lm_head(hidden, torch.float32)
        else:
            logits = self.lm_head(hidden)
            # GPUs sample from logits of 16 bits, too.
            logits = logits if logits.is_cuda else logits.float()
        if (softcap := self.config.logit_softcap) is not None:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        return logits

    @cached_property
    def _native(self) -> NativeLayers | None:
        if self.final_norm is None:
            return None
        return NativeLayers(self.config, self.layers, self.final_norm, self.cos_sin)

    @property
    def _others(self) -> Ranks:
        assert self.ranks is not None, "a stage of a pipeline has ranks"
        return self.ranks

    @property
    def _like(self) -> torch.Tensor:
        """An uninitialized tensor `[E]`, which shows the dtype and the device of hidden states."""
        return self.cos_sin.new_empty(self.config.hidden_size, dtype=self.dtype)

    def _add(
        self, out: torch.Tensor | None, residual: torch.Tensor, norm: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a branch's output to the residual.

        Returns:
            The sum normalized for the next branch, and the sum itself.
        """
        if out is not None and norm is not None:
            return ops.add_rms_norm(out, residual, norm, self.config.rms_norm_eps)
        total = residual if out is None else out + residual
        return self._norm(total, norm), total

    def _norm(self, x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        return x if norm is None else ops.rms_norm(x, norm, self.config.rms_norm_eps)

    def _store(
        self,
        index: int,
        layer: DecoderLayer,
        normed: torch.Tensor,  # [T, E]
        positions: torch.Tensor,
        pool: KvPool,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Store the tokens' K and V; return their rotated queries, `[T, H, D]`."""
        config = self.config
        heads = layer.qkv(normed).view(
            -1, config.num_heads + 2 * config.num_kv_heads, config.head_dim
        )
        query, key, value = torch.split(
            heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1
        )
        if layer.qk_norm is not None:
            query = _norm_heads(query, layer.qk_norm.query, config.rms_norm_eps)
            key = _norm_heads(key, layer.qk_norm.key, config.rms_norm_eps)
        if self.half_by_half is not None:
            query, key = (x.index_select(2, self.half_by_half) for x in (query, key))
        cos_sin = self.cos_sin
        if layer.window is not None and self.windowed_cos_sin is not None:
            cos_sin = self.windowed_cos_sin
        return rotary_store_kv(query, key, value, cos_sin, positions, pool, index, metadata)


def _norm_heads(heads: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalize `[T, H, D]`: each head, or all heads together if `norm` is `[H * D]`."""
    num_norms = heads.shape[1] * heads.shape[2] // len(norm)
    together = heads.reshape(len(heads), num_norms, len(norm))
    return ops.rms_norm(together, norm, eps).view(heads.shape)


def _native_wanted(metadata: AttentionMetadata) -> NativeWanted | None:
    if metadata.wanted is None:
        return None
    places, alone = metadata.wanted.places, metadata.wanted.metadata
    adapters = None if alone.adapters is None else alone.adapters.native
    if adapters is None and metadata.adapters is not None:
        adapters = RowAdapters(np.zeros(len(places), np.int64), {})
    return NativeWanted(places, alone.query_start_loc, adapters)


def build_llama(config: LlamaConfig, weights: Weights) -> LlamaDecoder:
    """Build this rank's part of the decoder; `weights.place` says which part."""
    return build_decoder(config, weights, lambda index: _layer(config, index, weights))


def build_decoder(
    config: LlamaConfig, weights: Weights, make_layer: Callable[[int], DecoderLayer]
) -> LlamaDecoder:
    """Build this rank's part of a decoder whose layers `make_layer` builds; see `build_llama`."""
    hidden, place = config.hidden_size, weights.place
    weights.ignore(r".*\.rotary_emb\.inv_freq")  # in old checkpoints
    if config.tie_word_embeddings:
        weights.ignore(r"lm_head\.weight")  # a copy of the embedding, in some checkpoints
    if config.predicts_further:
        weights.ignore(rf"model\.layers\.{config.num_layers}\..*")
    layers = place.layers(config.num_layers)

    def table(rope: RopeConfig) -> torch.Tensor:
        cos_sin = rotary_table(rope, config.rotary_dim, config.max_model_len)
        return cos_sin.to(weights.device)

    embedding = final_norm = lm_head = None
    if place.is_first_stage:
        embedding = weights.tensor("model.embed_tokens.weight", config.vocab_size, hidden)
    decoder_layers = tuple(map(make_layer, layers))
    if place.is_last_stage:
        final_norm = _norm(config, "model.norm", hidden, weights)
        name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        tied = embedding if config.tie_word_embeddings else None
        lm_head = weights.split_head(name, config.vocab_size, hidden, tied)
    embedding_scale = None
    if config.scales_embedding:
        embedding_scale = float(torch.tensor(hidden**0.5, dtype=weights.dtype))
    return LlamaDecoder(
        config=split_llama_config(config, place),
        dtype=weights.dtype,
        embedding=embedding,
        layers=decoder_layers,
        final_norm=final_norm,
        lm_head=lm_head,
        cos_sin=table(config.rope),
        windowed_cos_sin=None if config.windowed_rope is None else table(config.windowed_rope),
        half_by_half=_half_by_half(config, weights.device) if config.is_interleaved else None,
        embedding_scale=embedding_scale,
        ranks=weights.ranks,
    )


def _half_by_half(config: LlamaConfig, device: torch.device) -> torch.Tensor:
    order = torch.arange(config.head_dim)
    rotated = order[: config.rotary_dim].view(-1, 2)
    return torch.cat((rotated[:, 0], rotated[:, 1], order[config.rotary_dim :])).to(device)


def _layer(config: LlamaConfig, index: int, weights: Weights) -> DecoderLayer:
    hidden, head_dim, norms = config.hidden_size, config.head_dim, config.norms
    layer = f"model.layers.{index}"
    attention = f"{layer}.self_attn"
    qk_norm = None
    if config.qk_norm:
        together = config.normalizes_heads_together
        qk_norm = QkNorm(
            *(
                _norm(config, f"{attention}.{name}", head_dim * (heads if together else 1), weights)
                for name, heads in (("q_norm", config.num_heads), ("k_norm", config.num_kv_heads))
            )
        )

    def norm(name: str | None) -> torch.Tensor | None:
        return None if name is None else _norm(config, f"{layer}.{name}", hidden, weights)

    return DecoderLayer(
        input_norm=norm(norms.before_attention),
        qkv=attention_input(config, attention, weights),
        qk_norm=qk_norm,
        window=config.windows[index],
        attention_output=attention_output(config, attention, weights),
        attention_output_norm=norm(norms.after_attention),
        mlp_norm=norm(norms.before_mlp),
        feed_forward=weights.summed(_feed_forward(config, index, weights)),
        mlp_output_norm=norm(norms.after_mlp),
    )


def _norm(config: LlamaConfig, name: str, size: int, weights: Weights) -> torch.Tensor:
    """Read what a norm multiplies by."""
    if not config.norms_add_one:
        return weights.tensor(f"{name}.weight", size)
    return 1 + weights.tensor(f"{name}.weight", size, dtype=torch.float32)


def attention_output(config: LlamaConfig, attention: str, weights: Weights) -> Linear:
    """Make the linear map from the heads' results to hidden states."""
    output = f"{attention}.o_proj", config.hidden_size
    return weights.summed(
        weights.split_inputs(config.num_heads, config.head_dim, output, bias=config.output_bias)
    )


def attention_input(config: LlamaConfig, attention: str, weights: Weights) -> Linear:
    """Make the fused linear map from hidden states to queries, keys and values."""
    hidden, head_dim, bias = config.hidden_size, config.head_dim, config.qkv_bias
    query, key_value = (config.num_heads, head_dim), (config.num_kv_heads, head_dim)
    if config.has_fused_qkv:
        name = f"{attention}.qkv_proj"
        return weights.split_fused(hidden, name, query, key_value, key_value, bias=bias)
    return weights.split_outputs(
        hidden,
        (f"{attention}.q_proj", *query),
        (f"{attention}.k_proj", *key_value),
        (f"{attention}.v_proj", *key_value),
        bias=bias,
    )


def _feed_forward(config: LlamaConfig, index: int, weights: Weights) -> FeedForward:
    """Build this rank's share of a layer's feed-forward network.

    In each step, the outputs of all ranks' shares must be summed (`Weights.summed`).
    """
    layer, hidden, size = f"model.layers.{index}", config.hidden_size, config.intermediate_size
    if config.experts is not None and config.experts.layers[index]:
        return build_experts(config.experts, hidden, layer, weights)
    if config.has_fused_gate_up:
        return _fused_mlp(config, f"{layer}.mlp", weights)
    gate = GATES[config.activation]
    return build_gated_mlp(hidden, size, f"{layer}.mlp", weights, bias=config.mlp_bias, gate=gate)


def _fused_mlp(config: LlamaConfig, module: str, weights: Weights) -> GatedMlp:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    part, bias = (intermediate, 1), config.mlp_bias
    return GatedMlp(
        gate_up=weights.split_fused(hidden, f"{module}.gate_up_proj", part, part, bias=bias),
        down=weights.split_inputs(intermediate, 1, (f"{module}.down_proj", hidden), bias=bias),
        gate=GATES[config.activation],
    )
