"""The configs of Llama-shaped models, such as Llama, Mistral, Phi-3, Qwen and GLM."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from gpu_worker.models.experts.config import (
    ExpertsConfig,
    Routing,
    read_grouped_experts,
    read_mixtral_experts,
    read_qwen_experts,
    split_experts,
)
from gpu_worker.models.rope import LongRopeScaling, RopeConfig, rope_from_fields, rotary_dim
from gpu_worker.ranks.shards import Place
from gpu_worker.weights.json_fields import JsonFields, ModelError
from gpu_worker.weights.model_config import ModelConfig, read_architecture, read_model_config


@dataclass(frozen=True, slots=True)
class NormNames:
    """The names of a layer's norms in a checkpoint; None: there is no such norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    """The norm that attention's output passes before the output is added to the residual."""
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """The config of a Llama-shaped decoder."""

    hidden_size: int
    num_heads: int
    """A multiple of `num_kv_heads`."""
    intermediate_size: int
    """MLP size of layers without experts."""
    rms_norm_eps: float
    rope: RopeConfig
    windowed_rope: RopeConfig | None = None
    """The rotary embedding of layers with a window; None: `rope`."""
    rotary_dim: int
    """How many of a head's first dimensions are rotated; an even number."""
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    """Whether the attention's output projection has a bias."""
    mlp_bias: bool
    qk_norm: bool
    """Whether queries and keys are normalized before rotation."""
    normalizes_heads_together: bool = False
    """Whether queries and keys are normalized over all heads; otherwise head by head."""
    norms: NormNames = NormNames()
    is_interleaved: bool = False
    """Whether rotation pairs neighbouring dimensions; otherwise it pairs dimension i of the first
    half of the rotated dimensions with dimension i of the second half."""
    has_fused_qkv: bool
    """Whether the checkpoint has queries, keys and values as one map."""
    has_fused_gate_up: bool
    """Whether the checkpoint has gate and up as one map."""
    activation: str = "silu"
    """The activation of the gate, by its name in config.json; one of `GATES`."""
    norms_add_one: bool = False
    """Whether norms multiply by 1 + their weight, in fp32; otherwise they multiply by their weight,
    in its dtype."""
    scales_embedding: bool = False
    """Whether the embedding is multiplied by the square root of the hidden size."""
    attention_scale: float
    """Multiplies the scores of attention."""
    attention_softcap: float | None = None
    """See `attend`."""
    logit_softcap: float | None = None
    """Logits x become `logit_softcap * tanh(x / logit_softcap)`; None: they stay as they are."""
    windows: tuple[int | None, ...]
    """By layer: the number of tokens that a token sees, itself included; None: all before it."""
    experts: ExpertsConfig | None
    """The experts; None: no layer has any."""
    predicts_further: bool = False
    """Whether checkpoints may have one more layer, for multi-token prediction, which is ignored."""

    @property
    def has_c_layers(self) -> bool:
        """Whether there is code in C for all that the layers do between their linear maps."""
        return (
            self.experts is None
            and self.norms == NormNames()
            and not self.normalizes_heads_together
            and not self.is_interleaved
            and self.windowed_rope is None
            and self.activation == "silu"
            and not self.norms_add_one
            and self.attention_scale == self.head_dim**-0.5
            and self.attention_softcap is None
        )


class _ReadExperts(Protocol):
    def __call__(self, fields: JsonFields, *, num_layers: int) -> ExpertsConfig | None: ...


@dataclass(frozen=True, slots=True)
class _Window:
    """How an architecture reads `sliding_window`."""

    default: int | None = None
    """The window if config.json has no such field; None: no window."""
    is_by_layer: bool = False
    """Whether only some layers have the window."""
    has_switch: bool = False
    """Whether there is a window only if `use_sliding_window` is true."""
    period: int | None = None
    """Applies if config.json has no `layer_types`: every `period`-th layer has no window, and all
    other layers have the window. None: `layer_types` is required, unless `has_switch` is true."""
    period_field: str | None = None
    """The field that may set another period."""


@dataclass(frozen=True, slots=True)
class _Family:
    """An architecture's defaults where config.json is silent, as in `transformers`."""

    bias_field: str | None = None
    """The field that says whether queries, keys and values have biases; None: there is no such
    field, and `qkv_bias` holds."""
    qkv_bias: bool = False
    """Whether queries, keys and values have biases if `bias_field` does not say."""
    has_output_bias: bool = False
    """True: attention's output projection has a bias if queries, keys and values have biases.
    False: it has none."""
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    reads_qk_norm: bool = False
    """Whether queries and keys are normalized if the field `use_qk_norm` is true."""
    normalizes_heads_together: bool = False
    norms: NormNames = NormNames()
    is_interleaved: bool = False
    head_dim: int | None = None
    """None: hidden size divided by query heads."""
    rope_theta: float = 10000.0
    rotary_share: float | None = None
    """The default share of a head's dimensions that is rotated; None: all are, and config.json must
    not set another share."""
    rms_norm_eps: float = 1e-6
    has_fused_qkv: bool = False
    has_fused_gate_up: bool = False
    window: _Window | None = None
    """None: no layer has a window."""
    ropes_by_layer: bool = False
    """Whether layers with a window have a separate rotary embedding. If config.json has only one
    embedding, these layers use this embedding without its scaling."""
    windowed_theta: float | None = None
    """The default base of the rotary embedding of layers with a window; None: `rope_theta`."""
    activation: str = "silu"
    activation_field: str = "hidden_act"
    other_activations: tuple[str, ...] = ()
    """Other values of `activation_field` that mean `activation`."""
    norms_add_one: bool = False
    scales_embedding: bool = False
    ties_embeddings: bool = False
    has_query_scalar: bool = False
    """Whether `query_pre_attn_scalar`, by default 256, replaces the head dim in the scale of
    attention's scores, and whether `final_logit_softcapping` may cap logits."""
    caps_scores: bool = False
    """Whether `attn_logit_softcapping` may cap scores."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    read_experts: _ReadExperts | None = None
    """None: no layer has experts."""
    predicts_further: bool = False


_QWEN_WINDOW = _Window(4096, is_by_layer=True, has_switch=True)
_QWEN_2 = _Family(qkv_bias=True, window=_QWEN_WINDOW)
_QWEN_3 = _Family(bias_field="attention_bias", has_output_bias=True, qk_norm=True)
_GLM = _Family(
    bias_field="attention_bias",
    qkv_bias=True,
    head_dim=128,
    rotary_share=0.5,
    is_interleaved=True,
    rms_norm_eps=0.00000015625,
    has_fused_gate_up=True,
)
_OLMO_NORMS = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_OLMO = _Family(
    bias_field="attention_bias",
    has_output_bias=True,
    qk_norm=True,
    normalizes_heads_together=True,
    rms_norm_eps=1e-5,
)
_GEMMA = _Family(
    bias_field="attention_bias",
    has_output_bias=True,
    head_dim=256,
    activation="gelu_pytorch_tanh",
    norms_add_one=True,
    scales_embedding=True,
    ties_embeddings=True,
)
_LATER_GEMMA = replace(
    _GEMMA,
    activation_field="hidden_activation",
    norms=NormNames(
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    has_query_scalar=True,
)
_FAMILIES = {
    "GemmaForCausalLM": replace(_GEMMA, other_activations=("gelu",)),
    "Gemma2ForCausalLM": replace(
        _LATER_GEMMA,
        window=_Window(4096, is_by_layer=True, period=2),
        caps_scores=True,
        attention_softcap=50.0,
        logit_softcap=30.0,
    ),
    "Gemma3ForCausalLM": replace(
        _LATER_GEMMA,
        qk_norm=True,
        rope_theta=1e6,
        ropes_by_layer=True,
        windowed_theta=10000.0,
        window=_Window(4096, is_by_layer=True, period=6, period_field="sliding_window_pattern"),
    ),
    "Glm4ForCausalLM": replace(
        _GLM,
        norms=NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
    ),
    "Glm4MoeForCausalLM": _Family(
        bias_field="attention_bias",
        reads_qk_norm=True,
        rotary_share=0.5,
        rms_norm_eps=1e-5,
        read_experts=partial(read_grouped_experts, routing=Routing.SIGMOID, num_dense=1),
        predicts_further=True,
    ),
    "GlmForCausalLM": _GLM,
    "LlamaForCausalLM": _Family(
        bias_field="attention_bias", has_output_bias=True, reads_mlp_bias=True
    ),
    "MistralForCausalLM": _Family(window=_Window(4096)),
    "MixtralForCausalLM": _Family(
        window=_Window(), rope_theta=1e6, rms_norm_eps=1e-5, read_experts=read_mixtral_experts
    ),
    "Olmo2ForCausalLM": replace(_OLMO, norms=_OLMO_NORMS),
    "Olmo3ForCausalLM": replace(
        _OLMO,
        norms=_OLMO_NORMS,
        window=_Window(4096, is_by_layer=True),
        ropes_by_layer=True,
        rope_theta=500000.0,
    ),
    "OlmoeForCausalLM": replace(
        _OLMO, read_experts=partial(read_qwen_experts, size_field="intermediate_size")
    ),
    "Phi3ForCausalLM": _Family(
        rms_norm_eps=1e-5,
        rotary_share=1.0,
        has_fused_qkv=True,
        has_fused_gate_up=True,
        window=_Window(),
    ),
    "Qwen2ForCausalLM": _QWEN_2,
    "Qwen2MoeForCausalLM": _Family(
        bias_field="qkv_bias",
        qkv_bias=True,
        read_experts=partial(read_qwen_experts, has_shared=True),
    ),
    "Qwen3ForCausalLM": replace(_QWEN_3, head_dim=128, window=_QWEN_WINDOW),
    "Qwen3MoeForCausalLM": replace(_QWEN_3, read_experts=read_qwen_experts),
}
LLAMA_ARCHITECTURES = tuple(_FAMILIES)


def read_llama_config(fields: JsonFields) -> LlamaConfig:
    """Parse a config.json of one of `LLAMA_ARCHITECTURES`.

    Raises:
        ModelError: A file or field is missing, malformed, or asks for something unsupported.
    """
    family = _FAMILIES[read_architecture(fields)]
    _check_activation(fields, family)
    if fields.get("use_bidirectional_attention"):
        raise fields.unsupported("use_bidirectional_attention", "is true; only false is supported")
    if fields.get("clip_qkv") is not None:
        raise fields.unsupported(
            "clip_qkv", f"is {fields.get('clip_qkv')!r}; only null is supported"
        )
    common = read_model_config(fields)
    head_dim = fields.positive_int("head_dim", default=family.head_dim or common.head_dim)
    if head_dim % 2:
        raise fields.unsupported("head_dim", f"is {head_dim}; it must be even for rotary embedding")
    qkv_bias = family.qkv_bias
    if family.bias_field is not None:
        qkv_bias = fields.boolean(family.bias_field, default=qkv_bias)
    rope, windowed_rope = _ropes(fields, family)
    return LlamaConfig(
        architecture=common.architecture,
        vocab_size=common.vocab_size,
        max_model_len=min(common.max_model_len, rope.max_model_len or common.max_model_len),
        num_layers=common.num_layers,
        num_kv_heads=common.num_kv_heads,
        head_dim=head_dim,
        eos_token_ids=common.eos_token_ids,
        dtype=common.dtype,
        hidden_size=fields.positive_int("hidden_size"),
        num_heads=fields.positive_int("num_attention_heads"),
        intermediate_size=fields.positive_int("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", default=family.rms_norm_eps),
        rope=rope,
        windowed_rope=windowed_rope,
        rotary_dim=_rotary_dim(fields, family, rope, head_dim),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=family.ties_embeddings),
        qkv_bias=qkv_bias,
        output_bias=qkv_bias and family.has_output_bias,
        mlp_bias=family.reads_mlp_bias and fields.boolean("mlp_bias", default=False),
        qk_norm=family.qk_norm
        or (family.reads_qk_norm and fields.boolean("use_qk_norm", default=False)),
        normalizes_heads_together=family.normalizes_heads_together,
        norms=family.norms,
        is_interleaved=family.is_interleaved,
        has_fused_qkv=family.has_fused_qkv,
        has_fused_gate_up=family.has_fused_gate_up,
        activation=family.activation,
        norms_add_one=family.norms_add_one,
        scales_embedding=family.scales_embedding,
        attention_scale=_attention_scale(fields, family, head_dim),
        attention_softcap=_softcap(fields, "attn_logit_softcapping", family.attention_softcap)
        if family.caps_scores
        else None,
        logit_softcap=_softcap(fields, "final_logit_softcapping", family.logit_softcap)
        if family.has_query_scalar
        else None,
        windows=_windows(fields, family, common.num_layers),
        experts=None
        if family.read_experts is None
        else family.read_experts(fields, num_layers=common.num_layers),
        predicts_further=family.predicts_further,
    )


def split_llama_config(config: LlamaConfig, place: Place) -> LlamaConfig:
    """Return the config of one rank's layers and heads.

    `windows` still has an entry for each layer of the whole model, because a layer's window is
    looked up by the layer's number in the whole model.

    Raises:
        ModelError: The layers or heads cannot be split among the ranks.
    """
    if config.normalizes_heads_together and place.tensor_size > 1:
        raise ModelError(
            f"tensor-parallel-size is {place.tensor_size}; it must be 1 for {config.architecture},"
            " which normalizes the queries of all heads together"
        )
    heads = place.share("num_attention_heads", config.num_heads)
    kv_heads = place.share_or_repeat("num_key_value_heads", config.num_kv_heads)
    return replace(
        config,
        num_layers=len(place.layers(config.num_layers)),
        num_heads=len(heads),
        num_kv_heads=len(kv_heads),
        intermediate_size=len(place.share("intermediate_size", config.intermediate_size)),
        experts=None if config.experts is None else split_experts(config.experts, place),
    )


def _check_activation(fields: JsonFields, family: _Family) -> None:
    name = family.activation_field
    if fields.get(name) is None or fields.get(name) in family.other_activations:
        return
    fields.allow_only(name, family.activation)


def _attention_scale(fields: JsonFields, family: _Family, head_dim: int) -> float:
    if not family.has_query_scalar:
        return float(head_dim**-0.5)
    return float(fields.number("query_pre_attn_scalar", default=256.0) ** -0.5)


def _softcap(fields: JsonFields, name: str, default: float | None) -> float | None:
    """Read a cap of scores or logits; null means that there is none."""
    if not fields.has(name):
        return default
    if fields.get(name) is None:
        return None
    return fields.number(name)


def _ropes(fields: JsonFields, family: _Family) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the rotary embedding, and the separate one of layers with a window, if any."""
    read_rope = partial(
        rope_from_fields,
        default_theta=family.rope_theta,
        default_share=family.rotary_share or 1.0,
    )
    read_windowed = read_rope
    if family.windowed_theta is not None:
        read_windowed = partial(
            read_rope, default_theta=family.windowed_theta, theta_field="rope_local_base_freq"
        )
    if not family.ropes_by_layer:
        return read_rope(fields), None
    by_kind = fields.nested("rope_parameters")
    if not by_kind.values:  # before transformers 5
        rope = read_rope(fields)
        theta = rope.theta
        if family.windowed_theta is not None:
            theta = fields.number("rope_local_base_freq", default=family.windowed_theta)
        return rope, RopeConfig(theta)
    kinds = "full_attention", "sliding_attention"
    if ignored := sorted(by_kind.values.keys() - set(kinds)):
        raise by_kind.error(
            ignored[0],
            f"is {by_kind.get(ignored[0])!r}; it must be in {' or '.join(kinds)}, because"
            f" {read_architecture(fields)} ignores it elsewhere",
        )
    if scaling := fields.get("rope_scaling"):  # transformers merges both
        raise fields.unsupported(
            "rope_scaling", f"is {scaling!r}; with rope_parameters, only null is supported"
        )
    full, windowed = (
        read(
            replace(
                fields, values={**fields.values, "rope_parameters": by_kind.nested(kind).values}
            )
        )
        for kind, read in zip(kinds, (read_rope, read_windowed), strict=True)
    )
    # `with_long_factors` does not look into these dictionaries. transformers runs such a model.
    for kind, rope in zip(kinds, (full, windowed), strict=True):
        if isinstance(rope.scaling, LongRopeScaling):
            raise by_kind.unsupported(kind, "has LongRoPE, which is supported only in rope_scaling")
    return full, windowed


def _rotary_dim(fields: JsonFields, family: _Family, rope: RopeConfig, head_dim: int) -> int:
    if family.rotary_share is None:
        rope.refuse_partial_rotation(fields)
    return rotary_dim(fields, "partial_rotary_factor", rope, head_dim)


def _windows(fields: JsonFields, family: _Family, num_layers: int) -> tuple[int | None, ...]:
    everywhere, reads = (None,) * num_layers, family.window
    if reads is None:
        if fields.boolean("use_sliding_window", default=False):
            raise fields.unsupported("use_sliding_window", "is true; only false is supported")
        return everywhere
    is_off = reads.has_switch and not fields.boolean("use_sliding_window", default=False)
    is_null = fields.has("sliding_window") and fields.get("sliding_window") is None
    if is_off or is_null or not (fields.has("sliding_window") or reads.default):
        return everywhere
    window = fields.positive_int("sliding_window", default=reads.default)
    if not reads.is_by_layer:
        return (window,) * num_layers
    if fields.get("layer_types") is not None:
        return windows_by_layer(fields, num_layers, window)
    if reads.period is not None:
        period = reads.period
        if reads.period_field is not None:
            period = fields.positive_int(reads.period_field, default=period)
        return tuple(window if (layer + 1) % period else None for layer in range(num_layers))
    if not reads.has_switch:
        raise fields.unsupported("layer_types", "is missing")
    # Before transformers 4.53: layers from this one on have the window.
    first = fields.get("max_window_layers", default=28)
    if not isinstance(first, int):
        raise fields.error("max_window_layers", f"is {first!r}; it must be an integer")
    return tuple(window if layer >= first else None for layer in range(num_layers))


def windows_by_layer(fields: JsonFields, num_layers: int, window: int) -> tuple[int | None, ...]:
    """Return each layer's window: `window` for "sliding_attention" in `layer_types`, else None.

    Raises:
        ModelError: `layer_types` does not have "sliding_attention" or "full_attention" for each
            layer.
    """
    kinds = fields.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.error("layer_types", f"must be a list of {num_layers} names")
    unknown = [kind for kind in kinds if kind not in ("sliding_attention", "full_attention")]
    if unknown:
        raise fields.unsupported(
            "layer_types", f"has {unknown[0]!r}; known are sliding_attention and full_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
