"""Builds a Llama-shaped decoder from its weights, by the names that `transformers` gives them."""

from gpu_worker.models.decoder import Decoder
from gpu_worker.models.decoder_layer import DecoderLayer, FeedForward, GatedMlp, QkNorm
from gpu_worker.models.experts import Experts
from gpu_worker.models.linear import make_linear
from gpu_worker.models.llama_config import ExpertsConfig, LlamaConfig
from gpu_worker.models.rope import rotary_table
from gpu_worker.weights import Weights


def build_llama(config: LlamaConfig, weights: Weights) -> Decoder:
    """Build the decoder; raises what reading its tensors does."""
    hidden = config.hidden_size
    embedding = weights.tensor("model.embed_tokens.weight", config.vocab_size, hidden)
    weights.ignore(r".*\.rotary_emb\.inv_freq")  # in old checkpoints
    if config.tie_word_embeddings:
        weights.ignore(r"lm_head\.weight")  # the same again, in some
        head = embedding
    else:
        head = weights.tensor("lm_head.weight", config.vocab_size, hidden)
    cos_sin = rotary_table(config.rope, config.head_dim, config.max_model_len)
    return Decoder(
        config=config,
        embedding=embedding,
        layers=tuple(_layer(config, index, weights) for index in range(config.num_layers)),
        final_norm=weights.tensor("model.norm.weight", hidden),
        lm_head=weights.head(head),
        cos_sin=cos_sin.to(weights.device),
    )


def _layer(config: LlamaConfig, index: int, weights: Weights) -> DecoderLayer:
    hidden, head_dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
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
        qkv=weights.linear(
            hidden,
            (f"{attention}.q_proj", q_size),
            (f"{attention}.k_proj", kv_size),
            (f"{attention}.v_proj", kv_size),
            bias=config.qkv_bias,
        ),
        qk_norm=qk_norm,
        window=config.windows[index],
        attention_output=weights.linear(
            q_size, (f"{attention}.o_proj", hidden), bias=config.output_bias
        ),
        mlp_norm=weights.tensor(f"{layer}.post_attention_layernorm.weight", hidden),
        feed_forward=_feed_forward(config, layer, weights),
    )


def _feed_forward(config: LlamaConfig, layer: str, weights: Weights) -> FeedForward:
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
        gate_up=weights.linear(
            hidden, (gate, intermediate), (up, intermediate), bias=config.mlp_bias
        ),
        down=weights.linear(intermediate, (down, hidden), bias=config.mlp_bias),
    )
