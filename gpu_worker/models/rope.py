"""Rotary position embedding: parses what config.json asks for, and computes the table of angles.

Symbols: `D` head dim.
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch

from gpu_worker.weights.json_fields import JsonFields, ModelError

_KNOWN_FIELDS = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "short_factor",
    "long_factor",
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


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (https://arxiv.org/abs/2309.00071): as `Llama3Scaling`, with a linear ramp."""

    factor: float
    attention_factor: float
    """Multiplies rotated queries and keys."""
    beta_fast: float
    """Frequencies with more turns in the original context are kept."""
    beta_slow: float
    """Frequencies with fewer turns are divided."""
    is_truncated: bool
    """Whether the ramp begins and ends at whole dimensions."""
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Each frequency divided by a factor of its own (https://arxiv.org/abs/2402.13753)."""

    factors: tuple[float, ...]
    attention_factor: float
    """Multiplies rotated queries and keys."""
    max_model_len: int | None
    """Where other factors begin to hold for the whole sequence; None: they hold at any length."""


RopeScaling: TypeAlias = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding."""

    theta: float
    scaling: RopeScaling | None = None
    rotated_share: float = 1.0
    """Share of each head's dimensions that is rotated, from the first."""

    @property
    def max_model_len(self) -> int | None:
        """The longest sequence that it is right for; None: any."""
        return self.scaling.max_model_len if isinstance(self.scaling, LongRopeScaling) else None


def rope_from_fields(
    fields: JsonFields, *, default_theta: float = 10000.0, default_share: float = 1.0
) -> RopeConfig:
    """Parse config.json.

    Raises:
        UnsupportedError: `rotary_table` does not support it.
        ModelError: A field is missing or malformed.
    """
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
        case "default" | "dynamic":  # dynamic differs beyond max_position_embeddings alone
            scaling = None
        case "linear":
            scaling = LinearScaling(rope.number("factor"))
        case "llama3":
            scaling = _llama3_scaling(rope)
        case "yarn":
            scaling = _yarn_scaling(fields, rope)
        case "longrope":
            scaling = _longrope_scaling(fields, rope)
        case _:
            supported = "default, dynamic, linear, llama3, longrope, yarn"
            raise rope.unsupported("rope_type", f"is {kind!r}; supported are {supported}")
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


def _original_len(fields: JsonFields, rope: JsonFields) -> int:
    name = "original_max_position_embeddings"
    longest = fields.positive_int("max_position_embeddings")
    return rope.positive_int(name, default=fields.positive_int(name, default=longest))


def _factor(fields: JsonFields, rope: JsonFields, original_len: int) -> float:
    longest = fields.positive_int("max_position_embeddings")
    return rope.number("factor", default=longest / original_len)


def _yarn_scaling(fields: JsonFields, rope: JsonFields) -> YarnScaling:
    original_len = _original_len(fields, rope)
    factor = _factor(fields, rope, original_len)

    def strength(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = strength(1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        part, whole = rope.number("mscale"), rope.number("mscale_all_dim")
        attention_factor = strength(part) / strength(whole)
    return YarnScaling(
        factor=factor,
        attention_factor=rope.number("attention_factor", default=attention_factor),
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        is_truncated=rope.boolean("truncate", default=True),
        original_max_position_embeddings=original_len,
    )


def _longrope_scaling(fields: JsonFields, rope: JsonFields) -> LongRopeScaling:
    original_len = _original_len(fields, rope)
    factor = _factor(fields, rope, original_len)
    attention_factor = 1.0
    if factor > 1:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original_len))
    short, long = (_factors(rope, name) for name in ("short_factor", "long_factor"))
    return LongRopeScaling(
        factors=short,
        attention_factor=rope.number("attention_factor", default=attention_factor),
        max_model_len=None if short == long else original_len,
    )


def _factors(rope: JsonFields, name: str) -> tuple[float, ...]:
    factors = rope.get(name)
    if not isinstance(factors, list) or not all(
        isinstance(factor, int | float) and factor > 0 for factor in factors
    ):
        raise rope.error(name, f"is {factors!r}; it must be a list of positive numbers")
    return tuple(map(float, factors))


def rotary_table(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """Cosines, then sines, of every position's angles: float32 `[num_positions, D]`.

    With some scalings they are multiplied by the attention factor. `head_dim` is the number of
    rotated dimensions; `rotated_share` is ignored.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim  # [D / 2]
    wavelengths = rope.theta**exponents  # positions per radian
    frequencies = 1.0 / wavelengths
    strength = 1.0
    match rope.scaling:
        case LinearScaling(factor):
            frequencies = frequencies / factor
        case Llama3Scaling():
            frequencies = _stretch_as_llama3(frequencies, rope.scaling)
        case YarnScaling():
            frequencies = _stretch_as_yarn(wavelengths, rope.theta, rope.scaling)
            strength = rope.scaling.attention_factor
        case LongRopeScaling(factors):
            if len(factors) != len(wavelengths):
                raise ModelError(
                    f"short_factor has {len(factors)} numbers; the rotated pairs of a head are"
                    f" {len(wavelengths)}"
                )
            frequencies = 1.0 / (torch.tensor(factors) * wavelengths)
            strength = rope.scaling.attention_factor
        case None:
            pass
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * strength


def _stretch_as_llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Divide low frequencies by `factor`, and keep high ones, as Llama 3.1.

    Frequencies with fewer than `low_freq_factor` turns per original context are divided, those with
    more than `high_freq_factor` kept, and those between interpolated.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)  # 0: divided, 1: untouched
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _stretch_as_yarn(wavelengths: torch.Tensor, theta: float, scaling: YarnScaling) -> torch.Tensor:
    """Divide low frequencies by `factor`, keep high ones, and interpolate by dimension between."""
    head_dim = 2 * len(wavelengths)

    def dimension(turns: float) -> float:
        """Where a frequency makes so many turns in the original context."""
        longest = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(longest) / (2 * math.log(theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    last += 0.001 if first == last else 0  # as transformers, so that nothing is divided by 0
    divided = ((torch.arange(len(wavelengths)) - first) / (last - first)).clamp(0.0, 1.0)
    return divided / (scaling.factor * wavelengths) + (1 - divided) / wavelengths
