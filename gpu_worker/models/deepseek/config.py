"""The configs of models with multi-head latent attention. Needs no torch."""

from dataclasses import dataclass, replace
from typing import Final

from gpu_worker.models.experts.config import (
    ExpertsConfig,
    Routing,
    read_grouped_experts,
    split_experts,
)
from gpu_worker.models.rope import RopeConfig, YarnScaling, rope_from_fields
from gpu_worker.ranks.shards import Place
from gpu_worker.weights.json_fields import JsonFields
from gpu_worker.weights.model_config import ModelConfig, read_architecture, read_model_config


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig(ModelConfig):
    """The config of a decoder with multi-head latent attention.

    In the KV pool the model has one kv head: the latent, and the rotated key that all heads share.
    """

    hidden_size: int
    num_heads: int
    query_rank: int | None
    """Width that queries are projected to before they are split into heads; None: no projection."""
    latent_dim: int
    """Width of the latent that keys and values are computed from."""
    plain_dim: int
    """Dimensions of a head's queries and keys that are not rotated."""
    rotary_dim: int
    """Dimensions of a head's queries and keys that are rotated."""
    value_dim: int
    """Dimensions of a head's values."""
    attention_scale: float
    attention_bias: bool
    """Whether three maps have biases: the map to `query_rank` numbers, the map to the latent, and
    the output map."""
    is_interleaved: bool
    """Whether rotation pairs neighbouring dimensions; otherwise it pairs dimension i of the first
    half with dimension i of the second half."""
    rope: RopeConfig
    rms_norm_eps: float
    tie_word_embeddings: bool
    intermediate_size: int
    """MLP size of layers without experts."""
    experts: ExpertsConfig | None
    """The experts; None: no layer has any."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Each output of attention or of an MLP is multiplied by this, then added to the residual."""
    logits_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class _Family:
    """An architecture's rules, and its defaults where config.json is silent."""

    routing: Routing | None
    """None: no experts."""
    num_dense: int = 0
    """Number of layers without experts, before those with experts."""
    reads_layer_types: bool = False
    """Whether `mlp_layer_types`, if set, names the layers with experts."""
    reads_interleave: bool = True
    is_interleaved: bool = True
    tie_word_embeddings: bool = False
    rms_norm_eps: float = 1e-6
    has_scales: bool = False
    """Whether embeddings, residuals and logits are scaled, as in MiniCPM."""


_FAMILIES: Final = {
    "DeepseekV2ForCausalLM": _Family(Routing.SOFTMAX, reads_interleave=False),
    "DeepseekV3ForCausalLM": _Family(Routing.SIGMOID, num_dense=3),  # Kimi K2, too
    "Glm4MoeLiteForCausalLM": _Family(
        Routing.SIGMOID, num_dense=1, reads_layer_types=True, rms_norm_eps=1e-5
    ),
    "MiniCPM3ForCausalLM": _Family(
        None,
        reads_interleave=False,
        is_interleaved=False,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        has_scales=True,
    ),
    "YoutuForCausalLM": _Family(None, tie_word_embeddings=True),
}
DEEPSEEK_ARCHITECTURES: Final = tuple(_FAMILIES)


def read_deepseek_config(fields: JsonFields) -> DeepseekConfig:
    """Parse a config.json of one of `DEEPSEEK_ARCHITECTURES`.

    Raises:
        ModelError: config.json, or generation_config.json beside it, is malformed, lacks a field,
            or asks for something unsupported.
    """
    family = _FAMILIES[read_architecture(fields)]
    fields.allow_only("hidden_act", "silu")
    if fields.boolean("mlp_bias", default=False):
        raise fields.unsupported("mlp_bias", "is true; only false is supported")
    common = read_model_config(fields)
    rope = rope_from_fields(fields)
    rope.refuse_partial_rotation(fields)
    hidden_size = fields.positive_int("hidden_size")
    num_heads = fields.positive_int("num_attention_heads")
    latent_dim = fields.positive_int("kv_lora_rank")
    plain_dim = fields.positive_int("qk_nope_head_dim")
    rotary_dim = fields.positive_int("qk_rope_head_dim")
    if rotary_dim % 2:
        raise fields.error(
            "qk_rope_head_dim", f"is {rotary_dim}; it must be even for rotary embedding"
        )
    is_interleaved = family.is_interleaved
    if family.reads_interleave:
        is_interleaved = fields.boolean("rope_interleave", default=is_interleaved)
    config = DeepseekConfig(
        architecture=common.architecture,
        vocab_size=common.vocab_size,
        max_model_len=min(common.max_model_len, rope.max_model_len or common.max_model_len),
        num_layers=common.num_layers,
        num_kv_heads=1,
        head_dim=latent_dim + rotary_dim,
        latent_dim=latent_dim,
        eos_token_ids=common.eos_token_ids,
        dtype=common.dtype,
        hidden_size=hidden_size,
        num_heads=num_heads,
        query_rank=_query_rank(fields),
        plain_dim=plain_dim,
        rotary_dim=rotary_dim,
        value_dim=fields.positive_int("v_head_dim", default=hidden_size // num_heads),
        attention_scale=_attention_scale(plain_dim + rotary_dim, rope),
        attention_bias=fields.boolean("attention_bias", default=False),
        is_interleaved=is_interleaved,
        rope=rope,
        rms_norm_eps=fields.number("rms_norm_eps", default=family.rms_norm_eps),
        tie_word_embeddings=fields.boolean(
            "tie_word_embeddings", default=family.tie_word_embeddings
        ),
        intermediate_size=fields.positive_int("intermediate_size"),
        experts=_experts(fields, family, common.num_layers),
    )
    return _with_scales(config, fields) if family.has_scales else config


def split_deepseek_config(config: DeepseekConfig, place: Place) -> DeepseekConfig:
    """Return the config of the layers, heads and parts of the MLPs that the rank at `place` has.

    The latent is not split, because all heads read the whole latent.

    Raises:
        ModelError: The layers or heads cannot be split among the ranks.
    """
    return replace(
        config,
        num_layers=len(place.layers(config.num_layers)),
        num_heads=len(place.share("num_attention_heads", config.num_heads)),
        intermediate_size=len(place.share("intermediate_size", config.intermediate_size)),
        experts=None if config.experts is None else split_experts(config.experts, place),
    )


def _query_rank(fields: JsonFields) -> int | None:
    if fields.get("q_lora_rank") is None and fields.has("q_lora_rank"):
        return None
    return fields.positive_int("q_lora_rank")


def _attention_scale(query_dim: int, rope: RopeConfig) -> float:
    factor = rope.scaling.score_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    return float(query_dim**-0.5) * factor


def _experts(fields: JsonFields, family: _Family, num_layers: int) -> ExpertsConfig | None:
    if family.routing is None:
        return None
    return read_grouped_experts(
        fields,
        num_layers,
        routing=family.routing,
        num_dense=family.num_dense,
        reads_layer_types=family.reads_layer_types,
    )


def _with_scales(config: DeepseekConfig, fields: JsonFields) -> DeepseekConfig:
    root = config.num_layers**0.5
    depth = fields.number("scale_depth", default=root if fields.has("scale_depth") else 1.4)
    base = fields.positive_int(
        "dim_model_base", default=config.hidden_size if fields.has("dim_model_base") else 256
    )
    return replace(
        config,
        embedding_scale=fields.number("scale_emb", default=12.0),
        residual_scale=depth / root,
        logits_scale=base / config.hidden_size,
    )
