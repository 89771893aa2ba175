"""Reads `adapter_config.json` as PEFT writes it; what is not supported is refused by name."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpu_worker.weights.json_fields import JsonFields, read_json

CONFIG_FILE: Final = "adapter_config.json"

_HONOURED: Final = frozenset(
    {"peft_type", "task_type", "r", "lora_alpha", "use_rslora", "target_modules"}
    | {"init_lora_weights"}
)
_OF_TRAINING: Final = frozenset(
    {"auto_mapping", "base_model_name_or_path", "inference_mode", "revision", "peft_version"}
    | {"lora_dropout", "eva_config", "megatron_config", "megatron_core", "runtime_config"}
    | {"qalora_group_size"}
)
"""Fields that change nothing once an adapter is trained, or only together with one that is refused.

Of any other field only a value that asks for nothing is accepted, so that a variant of LoRA that is
newer than this file is refused, not mistaken for LoRA.
"""
_NEUTRAL: Final[tuple[object, ...]] = (None, False, "none", "", [], {})
_HARMLESS_STARTS: Final = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` after which the model's own weights are what they were."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What an adapter says of itself."""

    path: Path
    rank: int
    """Rows of each A, columns of each B."""
    scale: float
    """Multiplies B A."""
    target_modules: tuple[str, ...] | None
    """Ends of the names of the maps it has matrices for; None: the tensors alone say it."""


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Read an adapter's config.

    Raises:
        ModelError: it is missing or malformed, or asks for what is not supported.
    """
    fields = read_json(directory / CONFIG_FILE)
    if (kind := fields.get("peft_type")) != "LORA":
        raise fields.error("peft_type", f"is {kind!r}; supported is LORA")
    if (task := fields.get("task_type")) not in {None, "CAUSAL_LM"}:
        raise fields.error("task_type", f"is {task!r}; supported is CAUSAL_LM")
    for name, value in fields.values.items():
        if name not in _HONOURED | _OF_TRAINING and value not in _NEUTRAL:
            raise fields.error(name, f"is {value!r}, which is not supported")
    if (start := fields.get("init_lora_weights")) not in _HARMLESS_STARTS:
        raise fields.error(
            "init_lora_weights",
            f"is {start!r}, which has changed the model's own weights, too: that is not supported",
        )
    rank = fields.positive_int("r")
    divisor = math.sqrt(rank) if fields.boolean("use_rslora", default=False) else rank
    return AdapterConfig(
        path=fields.path,
        rank=rank,
        scale=fields.number("lora_alpha") / divisor,
        target_modules=_target_modules(fields),
    )


def _target_modules(fields: JsonFields) -> tuple[str, ...] | None:
    value = fields.get("target_modules")
    if isinstance(value, str) and value:
        return None  # a regular expression, or "all-linear"
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise fields.error(
            "target_modules", f"is {value!r}; it must be names of modules, or an expression"
        )
    return tuple(value)
