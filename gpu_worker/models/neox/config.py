"""The config of GPT-NeoX models."""

from dataclasses import dataclass, replace
from typing import Final

from gpu_worker.models.rope import RopeConfig, rope_from_fields, rotary_dim
from gpu_worker.ranks.shards import Place
from gpu_worker.weights.json_fields import JsonFields
from gpu_worker.weights.model_config import ModelConfig, read_model_config

_ACTIVATIONS: Final = ("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")


@dataclass(frozen=True, slots=True, kw_only=True)
class NeoxConfig(ModelConfig):
    """A GPT-NeoX decoder: each head is a kv head."""

    hidden_size: int
    """`num_kv_heads * head_dim`, except after `split_neox_config`."""
    intermediate_size: int
    layer_norm_eps: float
    activation: str
    rope: RopeConfig
    rotary_dim: int
    """Number of rotated dimensions of a head, from the first; even."""
    tie_word_embeddings: bool
    attention_bias: bool
    """Whether the attention's two projections have biases."""
    is_parallel: bool
    """Whether the feed-forward part takes the layer's input, as attention does."""


def read_neox_config(fields: JsonFields) -> NeoxConfig:
    """Parse the config.json of a GPTNeoXForCausalLM.

    Raises:
        ModelError: A file or field is missing, malformed or unsupported.
    """
    common = read_model_config(fields)
    hidden_size = fields.positive_int("hidden_size")
    num_heads = fields.positive_int("num_attention_heads")
    if hidden_size % num_heads:
        raise fields.error("num_attention_heads", f"must divide hidden_size, {hidden_size}")
    activation = fields.get("hidden_act", default="gelu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise fields.unsupported(
            "hidden_act", f"is {activation!r}; supported: {', '.join(_ACTIVATIONS)}"
        )
    rope = rope_from_fields(
        fields,
        # transformers 5 uses the names that all families share; older versions use these.
        default_theta=fields.number("rotary_emb_base", default=10000.0),
        default_share=fields.number("rotary_pct", default=0.25),
    )
    return NeoxConfig(
        architecture=common.architecture,
        vocab_size=common.vocab_size,
        max_model_len=min(common.max_model_len, rope.max_model_len or common.max_model_len),
        num_layers=common.num_layers,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        eos_token_ids=common.eos_token_ids,
        dtype=common.dtype,
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int("intermediate_size"),
        layer_norm_eps=fields.number("layer_norm_eps", default=1e-5),
        activation=activation,
        rope=rope,
        rotary_dim=rotary_dim(fields, "rotary_pct", rope, common.head_dim),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        attention_bias=fields.boolean("attention_bias", default=True),
        is_parallel=fields.boolean("use_parallel_residual", default=True),
    )


def split_neox_config(config: NeoxConfig, place: Place) -> NeoxConfig:
    """Return the config of one rank's layers and heads.

    Raises:
        ModelError: The layers or heads cannot be split among the ranks.
    """
    return replace(
        config,
        num_layers=len(place.layers(config.num_layers)),
        num_kv_heads=len(place.share("num_attention_heads", config.num_kv_heads)),
        intermediate_size=len(place.share("intermediate_size", config.intermediate_size)),
    )
