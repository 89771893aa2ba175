"""The configs of decoders with layer norms. Needs no torch."""

from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from gpu_worker.models.rope import RopeConfig, rope_from_fields, rotary_dim
from gpu_worker.ranks.shards import Place
from gpu_worker.weights.json_fields import JsonFields
from gpu_worker.weights.model_config import ModelConfig, read_architecture, read_model_config

_ACTIVATIONS: Final = "gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "silu"
_OF_GATED: Final = ("silu",)


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names of a checkpoint's tensors, where they differ by family."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    old_head: str | None = None
    """The map to the vocabulary in old checkpoints that have no `lm_head`."""
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """The maps to queries, keys and values. A single name is that of a fused map, whose outputs
    are query, key and value of head 0, then query, key and value of head 1, and so on."""
    output: str = "o_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNormConfig(ModelConfig):
    """The config of a decoder with layer norms."""

    hidden_size: int
    num_heads: int
    """A multiple of `num_kv_heads`."""
    intermediate_size: int
    layer_norm_eps: float
    adds_one_to_norms: bool
    """Whether norms multiply by 1 + their weight; otherwise they multiply by their weight."""
    activation: str
    is_gated: bool
    """Whether the feed-forward part has a gate (`GatedMlp`)."""
    rope: RopeConfig
    rotary_dim: int
    """How many of a head's first dimensions are rotated; an even number."""
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    """Whether the attention's output projection has a bias."""
    mlp_bias: bool
    windows: tuple[int | None, ...]
    """By layer: the number of tokens that a token sees, itself included; None: all before it."""
    is_parallel: bool
    """Whether attention and the feed-forward part both take the layer's input; otherwise the
    feed-forward part takes the sum of the layer's input and attention's output."""
    has_mlp_norm: bool
    """Whether the feed-forward part has a norm of its own; otherwise it shares attention's."""
    has_qk_norm: bool
    """Whether the queries and keys of each head are normalized before rotation."""
    names: TensorNames


_Flag: TypeAlias = tuple[str | None, bool]
"""A field of config.json and its default. If a family has no such field: None, and the value that
holds for the whole family."""


@dataclass(frozen=True, slots=True)
class _Family:
    """An architecture's field names, and its defaults where config.json is silent."""

    names: TensorNames
    eps_field: str
    activation: str
    qkv_bias: _Flag
    output_bias: _Flag
    mlp_bias: _Flag
    is_parallel: _Flag = (None, False)
    has_qk_norm: _Flag = (None, False)
    shares_norm: bool = False
    """Whether attention and the feed-forward part share one norm; otherwise each has its own.
    Matters only if both take the layer's input (`LayerNormConfig.is_parallel`)."""
    adds_one_to_norms: bool = False
    is_gated: bool = False
    has_kv_heads: bool = True
    """Whether `num_key_value_heads` is read; otherwise each head is a kv head."""
    reads_head_dim: bool = False
    """Whether `head_dim` is read; otherwise the head dim is hidden size / query heads."""
    has_window: bool = False
    theta_field: str = "rope_theta"
    share_field: str = "partial_rotary_factor"
    rotary_share: float | None = None
    """The share of a head's dimensions that is rotated unless config.json sets another share. None:
    all dimensions are rotated, and config.json must not set another share."""
    tie_word_embeddings: bool = False


_FAMILIES: Final = {
    "GPTNeoXForCausalLM": _Family(
        TensorNames(
            embedding="gpt_neox.embed_in",
            layers="gpt_neox.layers",
            final_norm="gpt_neox.final_layer_norm",
            old_head="embed_out",  # before transformers 5
            attention="attention",
            qkv=("query_key_value",),
            output="dense",
            up="dense_h_to_4h",
            down="dense_4h_to_h",
        ),
        eps_field="layer_norm_eps",
        activation="gelu",
        qkv_bias=("attention_bias", True),
        output_bias=("attention_bias", True),
        mlp_bias=(None, True),
        is_parallel=("use_parallel_residual", True),
        has_kv_heads=False,
        # transformers reads only these outside of `rope_parameters`.
        theta_field="rotary_emb_base",
        share_field="rotary_pct",
        rotary_share=0.25,
    ),
    "NemotronForCausalLM": _Family(
        TensorNames(),
        eps_field="norm_eps",
        activation="relu2",
        qkv_bias=("attention_bias", False),
        output_bias=("attention_bias", False),
        mlp_bias=("mlp_bias", False),
        adds_one_to_norms=True,
        reads_head_dim=True,
        rotary_share=0.5,
    ),
    "StableLmForCausalLM": _Family(
        TensorNames(),
        eps_field="layer_norm_eps",
        activation="silu",
        qkv_bias=("use_qkv_bias", False),
        output_bias=(None, False),
        mlp_bias=(None, False),
        is_parallel=("use_parallel_residual", False),
        has_qk_norm=("qk_layernorm", False),
        shares_norm=True,
        is_gated=True,
        rotary_share=0.25,
    ),
    "Starcoder2ForCausalLM": _Family(
        TensorNames(up="c_fc", down="c_proj"),
        eps_field="norm_epsilon",
        activation="gelu_pytorch_tanh",
        qkv_bias=("use_bias", True),
        output_bias=("use_bias", True),
        mlp_bias=("use_bias", True),
        reads_head_dim=True,
        has_window=True,
        tie_word_embeddings=True,
    ),
}
LAYER_NORM_ARCHITECTURES: Final = tuple(_FAMILIES)


def read_layer_norm_config(fields: JsonFields) -> LayerNormConfig:
    """Parse a config.json of one of `LAYER_NORM_ARCHITECTURES`.

    Raises:
        ModelError: A file or field is missing, malformed or unsupported.
    """
    family = _FAMILIES[read_architecture(fields)]
    common = read_model_config(fields)
    hidden_size = fields.positive_int("hidden_size")
    num_heads = fields.positive_int("num_attention_heads")
    head_dim = common.head_dim
    if not family.reads_head_dim:
        head_dim = hidden_size // num_heads
        if hidden_size % num_heads:
            raise fields.error("num_attention_heads", f"must divide hidden_size, {hidden_size}")
    activation = fields.get("hidden_act", default=family.activation)
    supported = _OF_GATED if family.is_gated else _ACTIVATIONS
    if not isinstance(activation, str) or activation not in supported:
        raise fields.unsupported(
            "hidden_act", f"is {activation!r}; supported: {', '.join(supported)}"
        )
    rope = rope_from_fields(
        fields,
        default_share=family.rotary_share or 1.0,
        theta_field=family.theta_field,
        share_field=family.share_field,
    )
    if family.rotary_share is None:
        rope.refuse_partial_rotation(fields)
    is_parallel = _read_flag(fields, family.is_parallel)
    return LayerNormConfig(
        architecture=common.architecture,
        vocab_size=common.vocab_size,
        max_model_len=min(common.max_model_len, rope.max_model_len or common.max_model_len),
        num_layers=common.num_layers,
        num_kv_heads=common.num_kv_heads if family.has_kv_heads else num_heads,
        head_dim=head_dim,
        eos_token_ids=common.eos_token_ids,
        dtype=common.dtype,
        hidden_size=hidden_size,
        num_heads=num_heads,
        intermediate_size=fields.positive_int("intermediate_size"),
        layer_norm_eps=fields.number(family.eps_field, default=1e-5),
        adds_one_to_norms=family.adds_one_to_norms,
        activation=activation,
        is_gated=family.is_gated,
        rope=rope,
        rotary_dim=rotary_dim(fields, family.share_field, rope, head_dim),
        tie_word_embeddings=fields.boolean(
            "tie_word_embeddings", default=family.tie_word_embeddings
        ),
        qkv_bias=_read_flag(fields, family.qkv_bias),
        output_bias=_read_flag(fields, family.output_bias),
        mlp_bias=_read_flag(fields, family.mlp_bias),
        windows=(_window(fields) if family.has_window else None,) * common.num_layers,
        is_parallel=is_parallel,
        has_mlp_norm=not (is_parallel and family.shares_norm),
        has_qk_norm=_read_flag(fields, family.has_qk_norm),
        names=family.names,
    )


def split_layer_norm_config(config: LayerNormConfig, place: Place) -> LayerNormConfig:
    """Return the config of one rank's layers and heads.

    `windows` keeps the entries of all layers, because a layer finds its entry by its number in the
    whole model.

    Raises:
        ModelError: The layers or heads cannot be split among the ranks.
    """
    heads = place.share("num_attention_heads", config.num_heads)
    kv_heads = place.share_or_repeat("num_key_value_heads", config.num_kv_heads)
    return replace(
        config,
        num_layers=len(place.layers(config.num_layers)),
        num_heads=len(heads),
        num_kv_heads=len(kv_heads),
        intermediate_size=len(place.share("intermediate_size", config.intermediate_size)),
    )


def _read_flag(fields: JsonFields, flag: _Flag) -> bool:
    name, value = flag
    return value if name is None else fields.boolean(name, default=value)


def _window(fields: JsonFields) -> int | None:
    return None if fields.get("sliding_window") is None else fields.positive_int("sliding_window")
