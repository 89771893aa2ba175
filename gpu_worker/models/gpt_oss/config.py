"""The config of gpt-oss."""

from dataclasses import dataclass
from typing import Final

from gpu_worker.models.experts.config import read_gpt_oss_experts
from gpu_worker.models.llama.config import (
    LlamaConfig,
    split_llama_config,
    windows_by_layer,
)
from gpu_worker.models.rope import rope_from_fields
from gpu_worker.ranks.shards import Place
from gpu_worker.weights.json_fields import JsonFields, ModelError
from gpu_worker.weights.model_config import read_model_config
from gpu_worker.weights.stored.format import MXFP4_ARCHITECTURE, MXFP4_GROUP_SIZE

GPT_OSS_ARCHITECTURE: Final = MXFP4_ARCHITECTURE


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig(LlamaConfig):
    """The config of a gpt-oss decoder, in which all layers have experts and sinks."""

    is_mxfp4: bool
    """Whether the checkpoint has the experts in MXFP4."""
    swiglu_alpha: float
    """Multiplies the gate before the sigmoid."""
    swiglu_limit: float
    """The limit of `gate`, and of the absolute value of `up`: larger values are clamped."""


def read_gpt_oss_config(fields: JsonFields) -> GptOssConfig:
    """Parse a config.json; defaults are those of `transformers`.

    Raises:
        ModelError: A file or field is missing, malformed, or asks for something unsupported.
    """
    fields.allow_only("hidden_act", "silu")
    if fields.get("rope_parameters") is None and not fields.get("rope_scaling"):
        raise fields.unsupported("rope_parameters", "is missing")
    common = read_model_config(fields)
    head_dim = fields.positive_int("head_dim", default=64)
    if head_dim % 2:
        raise fields.unsupported("head_dim", f"is {head_dim}; it must be even for rotary embedding")
    attention_bias = fields.boolean("attention_bias", default=True)
    rope = rope_from_fields(fields, default_theta=150000.0)
    rope.refuse_partial_rotation(fields)
    return GptOssConfig(
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
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-5),
        rope=rope,
        rotary_dim=head_dim,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=True,
        qk_norm=False,
        has_fused_qkv=False,
        has_fused_gate_up=False,
        attention_scale=float(head_dim**-0.5),
        windows=_windows(fields, common.num_layers),
        experts=read_gpt_oss_experts(fields, common.num_layers),
        is_mxfp4=fields.nested("quantization_config").get("quant_method") == "mxfp4",
        swiglu_alpha=fields.number("swiglu_alpha", default=1.702),
        swiglu_limit=fields.number("swiglu_limit", default=7.0),
    )


def split_gpt_oss_config(config: GptOssConfig, place: Place) -> LlamaConfig:
    """Do as `split_llama_config` does, and check that each rank gets whole MXFP4 groups.

    Raises:
        ModelError: The layers, heads or experts cannot be split among the ranks.
    """
    num_groups, size = config.intermediate_size // MXFP4_GROUP_SIZE, place.tensor_size
    if config.is_mxfp4 and num_groups % size:
        raise ModelError(
            f"tensor-parallel-size is {size}; it must divide the {num_groups} groups of"
            f" {MXFP4_GROUP_SIZE} in intermediate_size, {config.intermediate_size}"
        )
    return split_llama_config(config, place)


def _windows(fields: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    if fields.has("sliding_window") and fields.get("sliding_window") is None:
        return (None,) * num_layers
    window = fields.positive_int("sliding_window", default=128)
    if fields.get("layer_types") is None:
        return tuple(None if layer % 2 else window for layer in range(num_layers))
    return windows_by_layer(fields, num_layers, window)
