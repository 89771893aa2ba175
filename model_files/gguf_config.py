"""Converts a GGUF file's metadata to the fields of config.json and generation_config.json."""

import struct
from typing import Any, Final

from model_files.errors import ModelError
from model_files.gguf_header import GgufHeader

_ARCHITECTURES: Final = {
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
_WITH_HIDDEN_SIZE_SCALE: Final = {"gemma2": 46, "gemma3": 62}
"""How many layers the 27B model of each architecture has. A Gemma with this number of layers scales
attention's scores by the hidden size per head, all other Gemmas by the head dim. GGUF files do not
have this scale."""
_END_TOKENS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")

QUANT_METHOD: Final = "gguf"
"""The `quant_method` in config.json's `quantization_config`, if the file has quantized tensors."""


def to_config(header: GgufHeader) -> dict[str, Any]:
    """Return the fields of config.json.

    Raises:
        ModelError: The architecture or the value of a field is not supported, or a field is
            missing.
    """
    fields = _Fields(header)
    if fields.architecture not in _ARCHITECTURES:
        raise ModelError(
            f"{header.path}: general.architecture is {fields.architecture!r}; supported:"
            f" {', '.join(_ARCHITECTURES)}"
        )
    num_heads, hidden_size = fields["attention.head_count"], fields["embedding_length"]
    head_dim = fields.get("attention.key_length", hidden_size // num_heads)
    if fields.get("attention.value_length", head_dim) != head_dim:
        raise ModelError(
            f"{header.path}: attention.value_length is {fields['attention.value_length']}; it must"
            f" be attention.key_length, {head_dim}"
        )
    config = {
        "architectures": [_ARCHITECTURES[fields.architecture]],
        "hidden_size": hidden_size,
        "intermediate_size": fields["feed_forward_length"],
        "num_hidden_layers": fields["block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields["attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": fields["context_length"],
        "vocab_size": _embedding_rows(header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_theta": fields.get(
            "rope.freq_base", 1e6 if fields.architecture == "gemma3" else 10000.0
        ),
        "rope_scaling": _rope_scaling(fields, head_dim),
        "eos_token_id": end_tokens(header),
        "dtype": _dtype(header),
    }
    if "blk.0.attn_q.bias" in header.tensors:
        config["attention_bias"] = True
    if fields.architecture in ("gemma2", "gemma3"):
        config |= _gemma(fields, hidden_size // num_heads, head_dim)
    elif fields.get("attention.sliding_window"):
        raise ModelError(
            f"{header.path}: attention.sliding_window is {fields['attention.sliding_window']};"
            " GGUF files with windows are not supported"
        )
    num_experts = fields.get("expert_count", 0)
    if fields.architecture == "qwen3moe":
        config |= {
            "num_experts": num_experts,
            "num_experts_per_tok": fields["expert_used_count"],
            "moe_intermediate_size": fields["expert_feed_forward_length"],
            "norm_topk_prob": True,
        }
    elif num_experts:
        config |= {
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": num_experts,
            "num_experts_per_tok": fields["expert_used_count"],
            "sliding_window": None,
        }
    if any(tensor.type.is_quantized for tensor in header.tensors.values()):
        config["quantization_config"] = {"quant_method": QUANT_METHOD}
    return config


def _gemma(fields: "_Fields", hidden_size_per_head: int, head_dim: int) -> dict[str, Any]:
    """Return the fields of config.json that only Gemma 2 and 3 have."""
    is_27b = fields["block_count"] == _WITH_HIDDEN_SIZE_SCALE[fields.architecture]
    config: dict[str, Any] = {
        "query_pre_attn_scalar": hidden_size_per_head if is_27b else head_dim,
    }
    for theirs, ours in (
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
        ("rope.freq_base_swa", "rope_local_base_freq"),
    ):
        if (value := fields.get(theirs)) is not None:
            config[ours] = value
    window = fields.get("attention.sliding_window")
    if window is not None or fields.architecture == "gemma3":
        config["sliding_window"] = window or None
    pattern = fields.by_layer("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        config["layer_types"] = [
            "sliding_attention" if has_window else "full_attention" for has_window in pattern
        ]
    elif pattern is not None:
        config["sliding_window_pattern"] = pattern
    return config


def end_tokens(header: GgufHeader) -> list[int]:
    """Return the ids of the tokens that end an answer."""
    found = (header.metadata.get(f"tokenizer.ggml.{name}") for name in _END_TOKENS)
    return list(dict.fromkeys(token for token in found if token is not None))


class _Fields:
    """The model's metadata; names omit the architecture: "block_count" for "llama.block_count"."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self.architecture = str(header.metadata.get("general.architecture"))

    def get(self, name: str, default: Any = None) -> Any:
        value = self._header.metadata.get(f"{self.architecture}.{name}", default)
        if isinstance(value, list):  # one value per layer
            if len(set(value)) != 1:
                raise self.error(name, f"differs between layers: {value}")
            return value[0]
        return value

    def by_layer(self, name: str) -> Any:
        """Return a value that may be a list with an item for each layer; None: it is absent."""
        return self._header.metadata.get(f"{self.architecture}.{name}")

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise self.error(name, "is missing")
        return value

    def error(self, name: str, problem: str) -> ModelError:
        return ModelError(f"{self._header.path}: {self.architecture}.{name} {problem}")

    def rope_factors(self, name: str) -> list[float] | None:
        """Return tensor `name`, the divisors of the rotary frequencies; None if it is absent."""
        tensor = self._header.tensors.get(f"{name}.weight")
        if tensor is None:
            return None
        if tensor.type.name != "F32":
            raise ModelError(f"{self._header.path}: {name} is {tensor.type.name}; it must be F32")
        with self._header.path.open("rb") as file:
            file.seek(tensor.start)
            return list(struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.num_bytes)))


def _embedding_rows(header: GgufHeader) -> int:
    if "token_embd.weight" not in header.tensors:
        raise ModelError(f"{header.path} lacks token_embd.weight")
    return header.tensors["token_embd.weight"].shape[0]


def _dtype(header: GgufHeader) -> str:
    """Return the dtype to compute in, which depends on the types of the file's matrices.

    All F32: float32. All F16 or F32: float16, but bfloat16 for a Gemma. Otherwise: bfloat16.
    """
    types = {tensor.type.name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    if types <= {"F32"}:
        return "float32"
    is_gemma = str(header.metadata.get("general.architecture")).startswith("gemma")
    if is_gemma:  # its hidden states are larger than float16 can hold
        return "bfloat16"
    return "float16" if types <= {"F32", "F16"} else "bfloat16"


def _rope_scaling(fields: _Fields, head_dim: int) -> dict[str, Any] | None:
    dims = fields.get("rope.dimension_count", head_dim)
    if dims != head_dim:
        raise fields.error("rope.dimension_count", f"is {dims}; supported: {head_dim}")
    kind = fields.get("rope.scaling.type", "none")
    original = fields.get("rope.scaling.original_context_length", fields["context_length"])
    factor = fields.get("rope.scaling.factor", fields.get("rope.scale_linear", 1.0))
    short = fields.rope_factors("rope_factors_short")
    long = fields.rope_factors("rope_factors_long")
    if (factors := fields.rope_factors("rope_freqs")) is not None:
        short = long = factors  # Llama 3.1's scaling, as the program that made the file computed it
    if short is not None and long is not None:
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "attention_factor": fields.get("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": original,
        }
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise fields.error("rope.scaling.type", f"is {kind!r}; supported: none, linear, yarn")
