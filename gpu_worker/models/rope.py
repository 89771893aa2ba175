"""Parses the rotary position embedding of config.json. Needs no torch."""

import math
from dataclasses import dataclass
from typing import Final, TypeAlias

from gpu_worker.weights.json_fields import JsonFields
from gpu_worker.weights.model_config import read_architecture

_ORIGINAL_LEN: Final = "original_max_position_embeddings"
_ORIGINAL_LENS: Final = {"Phi3ForCausalLM": 4096}
"""By architecture: the value of `original_max_position_embeddings` if config.json has none at the
top level."""
_ONLY_INSIDE: Final = ("Olmo3ForCausalLM",)
"""Architectures that ignore `original_max_position_embeddings` at the top level of config.json."""
_OLD_NAMES: Final = {"Phi3ForCausalLM": ("su", "yarn")}
"""By architecture: older names of LongRoPE."""
_KNOWN_FIELDS = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    _ORIGINAL_LEN,
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
    """Linear scaling: all rotary frequencies are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling: low rotary frequencies are divided by `factor`, high ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (https://arxiv.org/abs/2309.00071): low rotary frequencies are divided, high ones kept.

    For frequencies between low and high, a linear ramp over the dimensions interpolates.
    """

    factor: float
    attention_factor: float
    """Multiplies rotated queries and keys."""
    score_factor: float
    """Multiplies the scores of multi-head latent attention; other kinds of attention ignore it. It
    is computed from `mscale_all_dim`."""
    beta_fast: float
    """Frequencies that make more turns than this within `original_max_position_embeddings` tokens
    are kept."""
    beta_slow: float
    """Frequencies that make fewer turns than this are divided by `factor`."""
    is_truncated: bool
    """Whether the ends of the ramp are rounded to whole dimensions."""
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (https://arxiv.org/abs/2402.13753): each frequency is divided by its own factor."""

    factors: tuple[float, ...]
    attention_factor: float
    """Multiplies rotated queries and keys."""
    max_model_len: int | None
    """The longest sequence to which `factors` apply; None: they apply to any length."""


RopeScaling: TypeAlias = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding."""

    theta: float
    scaling: RopeScaling | None = None
    rotated_share: float = 1.0
    """The share of each head's dimensions that is rotated; the rotated ones come first."""

    @property
    def max_model_len(self) -> int | None:
        """The longest sequence that the embedding supports; None: any length."""
        return self.scaling.max_model_len if isinstance(self.scaling, LongRopeScaling) else None

    def refuse_partial_rotation(self, fields: JsonFields) -> None:
        """Raise UnsupportedError if only a share of a head's dimensions is rotated."""
        if self.rotated_share != 1.0:
            raise fields.unsupported(
                "partial_rotary_factor", f"is {self.rotated_share}; only 1.0 is supported"
            )


def rope_from_fields(
    fields: JsonFields,
    *,
    default_theta: float = 10000.0,
    default_share: float = 1.0,
    theta_field: str = "rope_theta",
    share_field: str = "partial_rotary_factor",
) -> RopeConfig:
    """Parse the rotary position embedding of config.json.

    config.json describes the embedding in a dictionary, `rope_parameters` or `rope_scaling`. If the
    dictionary has no `rope_theta`, the top-level field named by `theta_field` is read instead. If
    the dictionary has no `partial_rotary_factor`, the top-level field named by `share_field` is
    read instead.

    Raises:
        UnsupportedError: `rotary_table` does not support the embedding.
        ModelError: A field is missing or malformed.
    """
    rope = fields.nested(_name(fields))
    top_level_theta = fields.number(theta_field, default=default_theta)
    theta = rope.number("rope_theta", default=top_level_theta)
    top_level_share = fields.number(share_field, default=default_share)
    rotated_share = rope.number("partial_rotary_factor", default=top_level_share)
    kind = _kind(fields, rope)
    scaling: RopeScaling | None
    match kind:
        case "default" | "dynamic":  # dynamic scaling differs only beyond max_position_embeddings
            scaling = None
        case "linear":
            scaling = LinearScaling(rope.number("factor"))
        case "llama3":
            scaling = _llama3_scaling(fields, rope)
        case "yarn":
            scaling = _yarn_scaling(fields, rope)
        case "longrope":
            scaling = _longrope_scaling(fields, rope)
        case _:
            supported = "default, dynamic, linear, llama3, longrope, yarn"
            raise rope.unsupported("rope_type", f"is {kind!r}; supported: {supported}")
    unknown = sorted(rope.values.keys() - _KNOWN_FIELDS)
    if unknown:
        known = ", ".join(sorted(_KNOWN_FIELDS))
        raise rope.unsupported(unknown[0], f"is unknown; known are {known}")
    return RopeConfig(theta, scaling, rotated_share)


def rotary_dim(fields: JsonFields, name: str, rope: RopeConfig, head_dim: int) -> int:
    """Return how many of a head's dimensions are rotated.

    `name` is the field of config.json that has `rope.rotated_share`; the `ModelError` names it.

    Raises:
        ModelError: The number is odd, 0, or more than the head has.
    """
    rotated = int(head_dim * rope.rotated_share)
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise fields.error(
            name,
            f"is {rope.rotated_share}; it must rotate an even number of a head's {head_dim}"
            " dimensions",
        )
    return rotated


def with_long_factors(fields: JsonFields, max_model_len: int | None) -> JsonFields:
    """Return `fields`; for long sequences, LongRoPE's long factors replace its short factors.

    Sequences longer than `original_max_position_embeddings` need the long factors. If
    `max_model_len` allows such sequences, shorter sequences must use the long factors, too: keys
    are stored rotated, and a sequence that outgrows `original_max_position_embeddings` would need
    other rotations of its stored keys.
    """
    name = _name(fields)
    rope = fields.nested(name)
    if max_model_len is None or _kind(fields, rope) != "longrope":
        return fields
    if max_model_len <= _original_len(fields, rope):
        return fields
    rope_values = {**rope.values, "short_factor": rope.get("long_factor")}
    return JsonFields(fields.path, fields.prefix, {**fields.values, name: rope_values})


def _name(fields: JsonFields) -> str:
    # transformers 5 writes `rope_parameters`; older versions write `rope_theta` at the top level,
    # and `rope_scaling`. If both dictionaries are there, transformers reads only `rope_scaling`,
    # unless it is empty.
    return "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"


def _kind(fields: JsonFields, rope: JsonFields) -> object:
    kind = rope.get("rope_type", default=rope.get("type", default="default"))
    return "longrope" if kind in _OLD_NAMES.get(read_architecture(fields), ()) else kind


def _llama3_scaling(fields: JsonFields, rope: JsonFields) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=_original_len(fields, rope),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.error(
            "high_freq_factor",
            f"is {scaling.high_freq_factor}; "
            f"it must be above low_freq_factor, {scaling.low_freq_factor}",
        )
    return scaling


def _original_len(fields: JsonFields, rope: JsonFields) -> int:
    """Return `original_max_position_embeddings`, or by default `max_position_embeddings`.

    The field may be at the top level of config.json and in its dictionary `rope`. As in
    transformers, the top level takes precedence; for OLMo 3 only the field in `rope` counts.
    """
    architecture = read_architecture(fields)
    longest = fields.positive_int("max_position_embeddings")
    inside = rope.positive_int(_ORIGINAL_LEN, default=longest)
    if architecture in _ONLY_INSIDE:
        return inside
    return fields.positive_int(_ORIGINAL_LEN, default=_ORIGINAL_LENS.get(architecture, inside))


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
    score_factor = 1.0
    if rope.get("mscale_all_dim"):
        score_factor = strength(rope.number("mscale_all_dim")) ** 2
    return YarnScaling(
        factor=factor,
        attention_factor=rope.number("attention_factor", default=attention_factor),
        score_factor=score_factor,
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
