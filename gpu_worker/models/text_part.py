"""Finds the text part of a model that also takes images; Quire serves only the text part."""

from collections.abc import Mapping
from typing import Final

from gpu_worker.models.config import read_architecture
from gpu_worker.weights.json_fields import JsonFields

_TEXT_PARTS: Final[Mapping[str, tuple[str, str]]] = {
    "Gemma3ForConditionalGeneration": ("gemma3_text", "Gemma3ForCausalLM"),
    "Mistral3ForConditionalGeneration": ("mistral", "MistralForCausalLM"),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl_text", "Qwen2ForCausalLM"),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl_text", "Qwen2ForCausalLM"),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl_text", "Qwen3ForCausalLM"),
}
"""By architecture: the `model_type` of its text part, and the text part's own architecture."""
_OF_THE_WHOLE: Final = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")
"""Fields that a text part takes from the whole model's config if it lacks them."""
_ROPES: Final = ("rope_parameters", "rope_scaling")
_OTHER_PARTS: Final = ("visual.", "vision_tower.", "multi_modal_projector.")


def has_text_part(fields: JsonFields) -> bool:
    """Whether a config.json describes a model with a text part."""
    return read_architecture(fields) in _TEXT_PARTS


def text_part(fields: JsonFields) -> JsonFields:
    """Return the fields of the text part, or all fields if the model has no other part.

    Raises:
        ModelError: The text part has another `model_type` than `_TEXT_PARTS` has.
    """
    if not has_text_part(fields):
        return fields
    architecture = read_architecture(fields)
    model_type, alone = _TEXT_PARTS[architecture]
    part = fields.nested("text_config") if fields.has("text_config") else fields  # older configs
    if part is not fields and part.get("model_type", model_type) != model_type:
        raise part.error(
            "model_type",
            f"is {part.get('model_type')!r}; {architecture} is supported only with {model_type}",
        )
    whole = {name: fields.values[name] for name in _OF_THE_WHOLE if fields.get(name) is not None}
    ropes = {name: _plain_rope(part.nested(name).values) for name in _ROPES if part.get(name)}
    values = {**whole, **part.values, **ropes, "architectures": [alone]}
    return JsonFields(fields.path, part.prefix, values)


def _plain_rope(rope: Mapping[str, object]) -> Mapping[str, object]:
    """Turn a rotary embedding with three positions a token, equal for text, into a plain one."""
    return {
        name: "default" if value == "mrope" else value
        for name, value in rope.items()
        if not name.startswith("mrope_")
    }


def name_alone(name: str) -> str | None:
    """Return a tensor's name in the text part alone; None: it belongs to another part."""
    if name.removeprefix("model.").startswith(_OTHER_PARTS):
        return None
    if name.startswith("language_model."):
        return name.removeprefix("language_model.")
    return name.replace("model.language_model.", "model.", 1)
