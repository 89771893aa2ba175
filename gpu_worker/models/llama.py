"""Builds a Llama-shaped decoder from its weights, by the names that `transformers` gives them."""

import torch

from gpu_worker.models.decoder import Decoder
from gpu_worker.models.decoder_layer import DecoderLayer, FeedForward, GatedMlp, QkNorm
from gpu_worker.models.experts import Experts
from gpu_worker.models.llama_config import ExpertsConfig, LlamaConfig, split_llama_config
from gpu_worker.models.rope import rotary_table
from gpu_worker.weights.linear import Linear, make_linear
from gpu_worker.weights.reader import Weights


def build_llama(config: LlamaConfig, weights: Weights) -> Decoder:
    """Build `weights.place`'s part of the decoder; raises what reading its tensors does."""
    hidden, place = config.hidden_size, weights.place
    weights.ignore(r".*\.rotary_emb\.inv_freq")  # in old checkpoints
    if config.tie_word_embeddings:
        weights.ignore(r"lm_head\.weight")  # the embedding again, in some
    layers = place.layers(config.num_layers)
    cos_sin = rotary_table(config.rope, config.head_dim, config.max_model_len)
    embedding = final_norm = lm_head = None
    if place.is_first_stage:
        embedding = weights.tensor("model.embed_tokens.weight", config.vocab_size, hidden)
    decoder_layers = tuple(_layer(config, index, weights) for index in layers)
    if place.is_last_stage:
        final_norm = weights.tensor("model.norm.weight", hidden)
        lm_head = weights.joined(_head(config, embedding, weights), config.vocab_size)
    return Decoder(
        config=split_llama_config(config, place),
        embedding=embedding,
        layers=decoder_layers,
        final_norm=final_norm,
        lm_head=lm_head,
        cos_sin=cos_sin.to(weights.device),
        ranks=weights.ranks,
    )


def _head(config: LlamaConfig, embedding: torch.Tensor | None, weights: Weights) -> Linear:
    """This rank's part of the map over the vocabulary."""
    rows = weights.place.vocabulary(config.vocab_size)
    if config.tie_word_embeddings and embedding is not None:
        return weights.head(embedding[rows.start : rows.stop])
    name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return weights.head(weights.rows(name, rows, config.vocab_size, config.hidden_size))


def _layer(config: LlamaConfig, index: int, weights: Weights) -> DecoderLayer:
    hidden, head_dim = config.hidden_size, config.head_dim
    layer = f"model.layers.{index}"
    attention = f"{layer}.self_attn"
    qk_norm = None
    if config.qk_norm:
        qk_norm = QkNorm(
            weights.tensor(f"{attention}.q_norm.weight", head_dim),
            weights.tensor(f"{attention}.k_norm.weight", head_dim),
        )
    return DecoderLayer(
        input_norm=weights.tensor(f"{layer}.input_layernorm.weight", hidden),
        qkv=weights.split_outputs(
            hidden,
            (f"{attention}.q_proj", config.num_heads, head_dim),
            (f"{attention}.k_proj", config.num_kv_heads, head_dim),
            (f"{attention}.v_proj", config.num_kv_heads, head_dim),
            bias=config.qkv_bias,
        ),
        qk_norm=qk_norm,
        window=config.windows[index],
        attention_output=weights.summed(
            weights.split_inputs(
                config.num_heads,
                head_dim,
                (f"{attention}.o_proj", hidden),
                bias=config.output_bias,
            )
        ),
        mlp_norm=weights.tensor(f"{layer}.post_attention_layernorm.weight", hidden),
        feed_forward=weights.summed(_feed_forward(config, layer, weights)),
    )


def _feed_forward(config: LlamaConfig, layer: str, weights: Weights) -> FeedForward:
    """This rank's part of a sum."""
    if config.experts is None:
        names = "gate_proj", "up_proj", "down_proj"
        return _gated_mlp(config, f"{layer}.mlp", names, weights)
    return _experts(config, config.experts, f"{layer}.block_sparse_moe", weights)


def _experts(
    config: LlamaConfig, experts: ExpertsConfig, module: str, weights: Weights
) -> FeedForward:
    names = "w1", "w3", "w2"
    # Never quantized: it is small, and other experts would be another model.
    router = weights.tensor(f"{module}.gate.weight", experts.num_experts, config.hidden_size)
    return Experts(
        router=make_linear(router, None),
        experts=tuple(
            _gated_mlp(config, f"{module}.experts.{index}", names, weights)
            for index in range(experts.num_experts)
        ),
        num_per_token=experts.num_per_token,
    )


def _gated_mlp(
    config: LlamaConfig, module: str, names: tuple[str, str, str], weights: Weights
) -> GatedMlp:
    gate, up, down = (f"{module}.{name}" for name in names)
    hidden, intermediate = config.hidden_size, config.intermediate_size
    return GatedMlp(
        gate_up=weights.split_outputs(
            hidden, (gate, intermediate, 1), (up, intermediate, 1), bias=config.mlp_bias
        ),
        down=weights.split_inputs(intermediate, 1, (down, hidden), bias=config.mlp_bias),
    )
