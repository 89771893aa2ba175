"""The configs of models with multi-head latent attention. Needs no torch."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from gpu_worker.models.rope import RopeConfig, YarnScaling, rope_from_fields
from gpu_worker.weights.json_fields import JsonFields
from gpu_worker.weights.model_config import ModelConfig, read_architecture, read_model_config


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig(ModelConfig):
    """A decoder of these families; their differences are fields here.

    The KV pool sees one kv head: the latent, and the rotated key that all heads share.
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
    """Whether the projections from and to the hidden state have biases."""
    is_interleaved: bool
    """Whether rotation pairs neighbouring dimensions; otherwise it pairs dimension i of each
    half."""
    rope: RopeConfig
    rms_norm_eps: float
    tie_word_embeddings: bool
    intermediate_size: int
    """MLP size of layers without experts."""
    has_experts: tuple[bool, ...]
    """Whether each layer has experts."""
    experts: "DeepseekExpertsConfig | None"
    """None: no layer has any."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Multiplies the outputs of attention and feed-forward part."""
    logits_scale: float = 1.0


class Routing(Enum):
    """How experts are scored and chosen."""

    SOFTMAX = "softmax"
    """As in DeepSeek V2: a group's score is its best expert's."""
    SIGMOID = "sigmoid"
    """As in DeepSeek V3: experts are chosen with a bias, and a group's score is the sum of its two
    best experts' scores."""


@dataclass(frozen=True, slots=True)
class DeepseekExpertsConfig:
    """Routed experts, and shared ones that compute every token."""

    routing: Routing
    num_experts: int
    num_per_token: int
    num_groups: int
    """Divides `num_experts`."""
    num_chosen_groups: int
    """Number of groups from which the experts of one token come."""
    has_shares_of_one: bool
    """Whether the shares of a token's experts are made to sum to 1, before `share_factor` applies.
    """
    share_factor: float
    intermediate_size: int
    """MLP size of each expert."""
    num_shared: int
    """Number of shared experts: one MLP that is this many times as wide as a routed one."""


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
        ModelError: A file or field is missing, malformed, or asks for something unsupported.
    """
    family = _FAMILIES[read_architecture(fields)]
    activation = fields.get("hidden_act", default="silu")
    if activation != "silu":
        raise fields.unsupported("hidden_act", f"is {activation!r}; only 'silu' is supported")
    if fields.boolean("mlp_bias", default=False):
        raise fields.unsupported("mlp_bias", "is true; only false is supported")
    common = read_model_config(fields)
    rope = rope_from_fields(fields)
    if rope.rotated_share != 1.0:
        raise fields.unsupported(
            "partial_rotary_factor", f"is {rope.rotated_share}; only 1.0 is supported"
        )
    hidden_size = fields.positive_int("hidden_size")
    num_heads = fields.positive_int("num_attention_heads")
    latent_dim = fields.positive_int("kv_lora_rank")
    plain_dim = fields.positive_int("qk_nope_head_dim")
    rotary_dim = fields.positive_int("qk_rope_head_dim")
    if rotary_dim % 2:
        raise fields.error(
            "qk_rope_head_dim", f"is {rotary_dim}; it must be even for rotary embedding"
        )
    has_experts = _has_experts(fields, family, common.num_layers)
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
        has_experts=has_experts,
        experts=_experts(fields, family.routing) if family.routing and any(has_experts) else None,
    )
    return _with_scales(config, fields) if family.has_scales else config


def _query_rank(fields: JsonFields) -> int | None:
    if fields.get("q_lora_rank") is None and fields.has("q_lora_rank"):
        return None
    return fields.positive_int("q_lora_rank")


def _attention_scale(query_dim: int, rope: RopeConfig) -> float:
    factor = rope.scaling.score_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    return float(query_dim**-0.5) * factor


def _has_experts(fields: JsonFields, family: _Family, num_layers: int) -> tuple[bool, ...]:
    """Read which layers have experts: those the config lists, or all after the first dense ones."""
    if family.routing is None:
        return (False,) * num_layers
    if fields.get("moe_layer_freq", default=1) != 1:
        raise fields.unsupported(
            "moe_layer_freq", f"is {fields.get('moe_layer_freq')!r}; only 1 is supported"
        )
    kinds = fields.get("mlp_layer_types")
    if family.reads_layer_types and kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise fields.error("mlp_layer_types", f"must be a list of {num_layers} names")
        unknown = [kind for kind in kinds if kind not in ("dense", "sparse")]
        if unknown:
            raise fields.error("mlp_layer_types", f"has {unknown[0]!r}; known are dense and sparse")
        return tuple(kind == "sparse" for kind in kinds)
    num_dense = fields.get("first_k_dense_replace", default=family.num_dense)
    if not isinstance(num_dense, int) or num_dense < 0:
        raise fields.error("first_k_dense_replace", f"is {num_dense!r}; it must be 0 or more")
    return tuple(layer >= num_dense for layer in range(num_layers))


def _experts(fields: JsonFields, routing: Routing) -> DeepseekExpertsConfig:
    scoring = fields.get("scoring_func", default=routing.value)
    if scoring != routing.value:
        raise fields.unsupported(
            "scoring_func", f"is {scoring!r}; only {routing.value!r} is supported"
        )
    num_experts = fields.positive_int("n_routed_experts")
    num_per_token = fields.positive_int("num_experts_per_tok")
    num_groups = fields.positive_int("n_group", default=1)
    num_chosen_groups = fields.positive_int("topk_group", default=1)
    if routing is Routing.SOFTMAX:
        method = fields.get("topk_method", default="greedy")
        if method == "greedy":
            num_groups = num_chosen_groups = 1
        elif method != "group_limited_greedy":
            supported = "greedy, group_limited_greedy"
            raise fields.unsupported("topk_method", f"is {method!r}; supported: {supported}")
    if num_experts % num_groups:
        raise fields.error("n_group", f"is {num_groups}; it must divide the {num_experts} experts")
    if num_chosen_groups > num_groups:
        raise fields.error("topk_group", f"is {num_chosen_groups}; n_group is {num_groups}")
    num_open = num_experts // num_groups * num_chosen_groups
    if num_per_token > num_open:
        raise fields.error(
            "num_experts_per_tok", f"is {num_per_token}; a token can choose among {num_open}"
        )
    return DeepseekExpertsConfig(
        routing=routing,
        num_experts=num_experts,
        num_per_token=num_per_token,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        # For V2, transformers ignores the field, and the shares need not sum to 1.
        has_shares_of_one=routing is Routing.SIGMOID
        and fields.boolean("norm_topk_prob", default=True),
        share_factor=fields.number("routed_scaling_factor", default=1.0),
        intermediate_size=fields.positive_int("moe_intermediate_size"),
        num_shared=fields.positive_int("n_shared_experts", default=1),
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
