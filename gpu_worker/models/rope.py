"""Rotary position embedding: parses what config.json asks for, and computes the table of angles.

Symbols: `D` head dim.
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch

from gpu_worker.weights.json_fields import JsonFields

_KNOWN_FIELDS = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
}


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Rotary frequencies divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling: low rotary frequencies are divided, high ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


RopeScaling: TypeAlias = LinearScaling | Llama3Scaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding."""

    theta: float
    scaling: RopeScaling | None = None
    rotated_share: float = 1.0
    """Share of each head's dimensions that is rotated, from the first."""


def rope_from_fields(
    fields: JsonFields, *, default_theta: float = 10000.0, default_share: float = 1.0
) -> RopeConfig:
    """Parse config.json; raises ModelError for what `rotary_table` does not support."""
    # transformers 5 writes one dictionary, older versions a number and a dictionary for the
    # scaling.
    name = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    rope = fields.nested(name)
    top_level_theta = fields.number("rope_theta", default=default_theta)
    theta = rope.number("rope_theta", default=top_level_theta)
    top_level_share = fields.number("partial_rotary_factor", default=default_share)
    rotated_share = rope.number("partial_rotary_factor", default=top_level_share)
    kind = rope.get("rope_type", default=rope.get("type", default="default"))
    scaling: RopeScaling | None
    match kind:
        case "default":
            scaling = None
        case "linear":
            scaling = LinearScaling(rope.number("factor"))
        case "llama3":
            scaling = _llama3_scaling(rope)
        case _:
            raise rope.error("rope_type", f"is {kind!r}; supported are default, linear, llama3")
    unknown = sorted(rope.values.keys() - _KNOWN_FIELDS)
    if unknown:
        raise rope.error(unknown[0], f"is unknown; known are {', '.join(sorted(_KNOWN_FIELDS))}")
    return RopeConfig(theta, scaling, rotated_share)


def _llama3_scaling(rope: JsonFields) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.positive_int("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.error(
            "high_freq_factor",
            f"is {scaling.high_freq_factor}; "
            f"it must be above low_freq_factor, {scaling.low_freq_factor}",
        )
    return scaling


def rotary_table(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """Cosines, then sines, of every position's angles: float32 `[num_positions, D]`.

    `head_dim` is the number of rotated dimensions; `rotated_share` is ignored.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim  # [D / 2]
    frequencies = 1.0 / rope.theta**exponents  # radians per position
    match rope.scaling:
        case LinearScaling(factor):
            frequencies = frequencies / factor
        case Llama3Scaling():
            frequencies = _stretch_as_llama3(frequencies, rope.scaling)
        case None:
            pass
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _stretch_as_llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Divide low frequencies by `factor`, and keep high ones, as Llama 3.1.

    Frequencies with fewer than `low_freq_factor` turns per original context are divided, those with
    more than `high_freq_factor` kept, and those between interpolated.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)  # 0: divided, 1: untouched
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies
