"""What a model is, parsed from the `config.json` of a Hugging Face directory."""

from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from gpu_worker.json_fields import JsonFields, ModelError, read_json
from gpu_worker.models.rope import RopeConfig, rope_from_fields

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of one of the supported families; what differs between families is a flag here."""

    architecture: str
    """As in `architectures` of config.json, such as "LlamaForCausalLM"."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Divides `num_heads`."""
    head_dim: int
    """Even; not always `hidden_size / num_heads`."""
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    """Whether the attention's output projection has a bias."""
    mlp_bias: bool
    qk_norm: bool
    """Whether queries and keys are normalized per head before rotation."""
    sliding_window: int | None
    """Tokens that some layer looks back, itself included; None if every layer sees all."""
    eos_token_ids: tuple[int, ...]
    """Of config.json and generation_config.json together; may be empty."""
    dtype: torch.dtype
    """Of the checkpoint; float32 if config.json does not say."""

    @property
    def max_model_len(self) -> int:
        """The most tokens a sequence may have.

        Attention here has no window. Up to the window's length a model with one computes the same
        without, so its sequences end there rather than go wrong.
        """
        if self.sliding_window is None:
            return self.max_position_embeddings
        return min(self.max_position_embeddings, self.sliding_window)


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""The number formats a model can run in, by the name that config.json and flags use."""


def resolve_dtype(name: str, config: ModelConfig) -> torch.dtype:
    """The number format that a flag asks for: one of `DTYPES`, or "auto" for the checkpoint's."""
    if name == "auto":
        return config.dtype
    if name not in DTYPES:
        raise ModelError(f"dtype is {name!r}; it must be auto, {', '.join(DTYPES)}")
    return DTYPES[name]


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture implies where its config.json is silent, as `transformers` has it."""

    qkv_bias: bool = False
    reads_attention_bias: bool = False
    """Whether `attention_bias` gives all four attention projections a bias."""
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    """None: hidden size divided by query heads."""
    windows_by_layer: bool = False
    """Whether a sliding window needs `use_sliding_window` and is for some layers only."""
    sliding_window: int | None = None
    """None: it has none, whatever config.json says."""


_FAMILIES = {
    "LlamaForCausalLM": _Family(reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": _Family(sliding_window=4096),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, windows_by_layer=True, sliding_window=4096),
    "Qwen3ForCausalLM": _Family(
        reads_attention_bias=True,
        qk_norm=True,
        head_dim=128,
        windows_by_layer=True,
        sliding_window=4096,
    ),
}


def load_model_config(directory: Path) -> ModelConfig:
    """Parse `config.json`, and `generation_config.json` if there is one, of a model directory.

    Raises:
        ModelError: a file or field is missing, malformed, or asks for what is not supported.
    """
    fields = read_json(directory / "config.json")
    architecture = _architecture(fields)
    family = _FAMILIES[architecture]
    _refuse_unsupported(fields)
    hidden_size = fields.positive_int("hidden_size")
    num_heads = fields.positive_int("num_attention_heads")
    attention_bias = family.reads_attention_bias and fields.boolean("attention_bias", default=False)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=hidden_size,
        num_layers=fields.positive_int("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.positive_int("num_key_value_heads", default=num_heads),
        head_dim=fields.positive_int(
            "head_dim", default=family.head_dim or hidden_size // num_heads
        ),
        intermediate_size=fields.positive_int("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope=rope_from_fields(fields),
        max_position_embeddings=fields.positive_int("max_position_embeddings"),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family.reads_mlp_bias and fields.boolean("mlp_bias", default=False),
        qk_norm=family.qk_norm,
        sliding_window=_sliding_window(fields, family),
        eos_token_ids=_eos_token_ids(fields, directory / "generation_config.json"),
        dtype=_dtype(fields),
    )
    if num_heads % config.num_kv_heads:
        raise fields.error("num_key_value_heads", f"must divide num_attention_heads, {num_heads}")
    if config.head_dim % 2:
        raise fields.error("head_dim", f"is {config.head_dim}; rotary embedding needs it even")
    if config.max_model_len < config.max_position_embeddings:
        _log.warning(
            "context limited to the sliding window: attention over a window is not implemented",
            sliding_window=config.sliding_window,
            max_position_embeddings=config.max_position_embeddings,
        )
    return config


def _architecture(fields: JsonFields) -> str:
    names = fields.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.error("architectures", "must be a list of one name")
    if names[0] not in _FAMILIES:
        raise fields.error(
            "architectures", f"names {names[0]}; supported are {', '.join(_FAMILIES)}"
        )
    return names[0]


def _refuse_unsupported(fields: JsonFields) -> None:
    if fields.get("quantization_config") is not None:
        raise fields.error("quantization_config", "is set; quantized checkpoints are not supported")
    activation = fields.get("hidden_act", default="silu")
    if activation != "silu":
        raise fields.error("hidden_act", f"is {activation!r}; only 'silu' is supported")


def _sliding_window(fields: JsonFields, family: _Family) -> int | None:
    if family.sliding_window is None:
        return None
    if family.windows_by_layer:
        if not fields.boolean("use_sliding_window", default=False):
            return None
        layer_types = fields.get("layer_types")
        if isinstance(layer_types, list) and "sliding_attention" not in layer_types:
            return None
    if fields.has("sliding_window") and fields.get("sliding_window") is None:
        return None
    return fields.positive_int("sliding_window", default=family.sliding_window)


def _eos_token_ids(fields: JsonFields, generation_config: Path) -> tuple[int, ...]:
    ids = fields.int_list("eos_token_id")
    if generation_config.exists():
        ids += read_json(generation_config).int_list("eos_token_id")
    return tuple(dict.fromkeys(ids))


def _dtype(fields: JsonFields) -> torch.dtype:
    # transformers 5 writes `dtype`, older ones `torch_dtype`.
    name = fields.get("dtype", default=fields.get("torch_dtype", default="float32"))
    if not isinstance(name, str) or name not in DTYPES:
        raise fields.error("dtype", f"is {name!r}; supported are {', '.join(DTYPES)}")
    return DTYPES[name]
