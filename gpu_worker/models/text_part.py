"""Finds the text part of a model that also takes images; Quire serves only the text part."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gpu_worker.weights.json_fields import JsonFields
from gpu_worker.weights.model_config import read_architecture


@dataclass(frozen=True, slots=True)
class _Alone:
    """What config.json would say if a text part were a separate model."""

    architecture: str
    model_type: str
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Fields that older configs omit, with the values that `transformers` gives them."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Fields that `transformers` does not read, with the values that its code assumes."""
    ties_as_whole: bool = False
    """Whether the whole model's `tie_word_embeddings` applies even if the part has the field."""


_SIZES_OF_7B: Final = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_LLAMA: Final = {"intermediate_size": 11008, "max_position_embeddings": 2048}
_MISTRAL: Final = {
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
}
_LLAMA_SHAPED: Final = {
    "llama": _Alone("LlamaForCausalLM", "llama", _SIZES_OF_7B | _LLAMA),
    "mistral": _Alone("MistralForCausalLM", "mistral", _SIZES_OF_7B | _MISTRAL),
    "qwen2": _Alone("Qwen2ForCausalLM", "qwen2"),
    "qwen3": _Alone("Qwen3ForCausalLM", "qwen3"),
}
_GEMMA_3: Final = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}
_COHERE_2: Final = {"cohere2": _Alone("Cohere2ForCausalLM", "cohere2")}
_TEXT_PARTS: Final[Mapping[str, Mapping[str, _Alone]]] = {
    "AyaVisionForConditionalGeneration": _COHERE_2,
    "Cohere2VisionForConditionalGeneration": _COHERE_2,
    "Gemma3ForConditionalGeneration": {
        "gemma3_text": _Alone("Gemma3ForCausalLM", "gemma3_text", _GEMMA_3, ties_as_whole=True)
    },
    "Gemma3nForConditionalGeneration": {
        "gemma3n_text": _Alone("Gemma3nForCausalLM", "gemma3n_text")
    },
    "Gemma4ForConditionalGeneration": {"gemma4_text": _Alone("Gemma4ForCausalLM", "gemma4_text")},
    "Gemma4UnifiedForConditionalGeneration": {
        "gemma4_unified_text": _Alone("Gemma4UnifiedForCausalLM", "gemma4_unified_text")
    },
    "Idefics3ForConditionalGeneration": _LLAMA_SHAPED,
    "InternVLForConditionalGeneration": _LLAMA_SHAPED,
    "LlavaForConditionalGeneration": _LLAMA_SHAPED,
    "LlavaNextForConditionalGeneration": _LLAMA_SHAPED,
    "LlavaOnevisionForConditionalGeneration": _LLAMA_SHAPED,
    "SmolVLMForConditionalGeneration": _LLAMA_SHAPED,
    "Llama4ForConditionalGeneration": {"llama4_text": _Alone("Llama4ForCausalLM", "llama4_text")},
    "Mistral3ForConditionalGeneration": {
        "mistral": _Alone("MistralForCausalLM", "mistral"),
        "ministral3": _Alone("Ministral3ForCausalLM", "ministral3"),
    },
    "Qwen2VLForConditionalGeneration": {"qwen2_vl_text": _Alone("Qwen2ForCausalLM", "qwen2")},
    "Qwen2_5_VLForConditionalGeneration": {"qwen2_5_vl_text": _Alone("Qwen2ForCausalLM", "qwen2")},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": _Alone("Qwen3ForCausalLM", "qwen3")},
    "Qwen3VLMoeForConditionalGeneration": {
        "qwen3_vl_moe_text": _Alone(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            fixed={"norm_topk_prob": True},
            ties_as_whole=True,
        )
    },
    "Qwen3_5ForConditionalGeneration": {
        "qwen3_5_text": _Alone("Qwen3_5ForCausalLM", "qwen3_5_text")
    },
    "Qwen3_5MoeForConditionalGeneration": {
        "qwen3_5_moe_text": _Alone("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text")
    },
}
"""The text part as a separate model, by the architecture of the whole model and the `model_type` of
the text part. Text parts that are not listed here are not supported."""
_OF_THE_WHOLE: Final = (
    *("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings", "quantization_config"),
)
"""Fields that come from the whole model's config if the text part's config lacks them."""
_ROPES: Final = ("rope_parameters", "rope_scaling")
_OTHER_PARTS: Final = (
    *("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "embed_vision."),
    *("vision_embedder.", "audio_tower.", "embed_audio.", "connector.", "image_newline"),
)
PREFIXES: Final = {
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.": "",
}
"""Maps the prefix of the text part's tensors in the whole model to their prefix in the part alone.
"""


def has_text_part(fields: JsonFields) -> bool:
    """Whether a config.json describes a model with a text part."""
    return read_architecture(fields) in _TEXT_PARTS


def has_stacked_experts(fields: JsonFields) -> bool:
    """Whether a checkpoint may have one tensor for all experts of a layer; see `ExpertsFile`."""
    return read_architecture(fields) == "Qwen3VLMoeForConditionalGeneration"


def text_part(fields: JsonFields) -> JsonFields:
    """Return the fields of the text part, or all fields if the model has no other part.

    Raises:
        ModelError: The text part's `model_type` is not in `_TEXT_PARTS`.
    """
    if not has_text_part(fields):
        return fields
    architecture = read_architecture(fields)
    supported = _TEXT_PARTS[architecture]
    model_type: object = next(iter(supported))
    part = fields.nested("text_config") if fields.has("text_config") else fields  # older configs
    if part is not fields:
        model_type = part.get("model_type", model_type)
    if not isinstance(model_type, str) or model_type not in supported:
        raise part.error(
            "model_type",
            f"is {model_type!r}; {architecture} is supported only with {' or '.join(supported)}",
        )
    alone = supported[model_type]
    whole = {name: fields.values[name] for name in _OF_THE_WHOLE if fields.get(name) is not None}
    ropes = {name: plain_rope(part.nested(name).values) for name in _ROPES if part.get(name)}
    its_own: dict[str, object] = {
        "architectures": [alone.architecture],
        "model_type": alone.model_type,
    }
    if alone.ties_as_whole:
        its_own["tie_word_embeddings"] = fields.get("tie_word_embeddings")
    values = {**alone.defaults, **whole, **part.values, **ropes, **its_own, **alone.fixed}
    return JsonFields(fields.path, part.prefix, values)


def plain_rope(rope: Mapping[str, object]) -> Mapping[str, object]:
    """Turn a rotary embedding with three positions per token into a plain one.

    A text token needs only one position, because its three positions are equal.
    """
    return {
        name: "default" if value == "mrope" else value
        for name, value in rope.items()
        if not name.startswith("mrope_")
    }


def name_alone(name: str) -> str | None:
    """Return the name that a tensor would have if the text part were a separate model.

    None: the tensor belongs to another part, such as the vision tower.
    """
    if name.removeprefix("model.").startswith(_OTHER_PARTS):
        return None
    for prefix, alone in PREFIXES.items():
        if name.startswith(prefix):
            return alone + name.removeprefix(prefix)
    return name
