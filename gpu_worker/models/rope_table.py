"""Computes the table of cosines and sines of rotary position embedding.

Symbols: `D` head dim.
"""

import math

import torch

from gpu_worker.models.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)
from gpu_worker.weights.json_fields import ModelError


def rotary_table(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """Return cosines, then sines, of every position's angles: float32 `[num_positions, D]`.

    With YaRN and LongRoPE, the cosines and sines are multiplied by the attention factor. `head_dim`
    is the number of rotated dimensions of a head; `rope.rotated_share` is ignored.
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
                    f"short_factor has {len(factors)} numbers; a head has {len(wavelengths)}"
                    " rotated pairs"
                )
            frequencies = 1.0 / (torch.tensor(factors) * wavelengths)
            strength = rope.scaling.attention_factor
        case None:
            pass
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * strength


def _stretch_as_llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Divide low frequencies by `factor`, and keep high ones, as Llama 3.1 does.

    A frequency that makes fewer than `low_freq_factor` turns in `original_max_position_embeddings`
    tokens is divided. A frequency that makes more than `high_freq_factor` turns is kept.
    Frequencies in between are interpolated.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)  # 0: divided, 1: untouched
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _stretch_as_yarn(wavelengths: torch.Tensor, theta: float, scaling: YarnScaling) -> torch.Tensor:
    """Divide low frequencies by `factor`, keep high ones, and interpolate those in between."""
    head_dim = 2 * len(wavelengths)

    def dimension(turns: float) -> float:
        """Return the index in `wavelengths` of the angle that makes `turns` turns.

        The turns are counted over `original_max_position_embeddings` positions. The index may be
        fractional.
        """
        longest = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(longest) / (2 * math.log(theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    last += 0.001 if first == last else 0  # as transformers does, to avoid a division by 0
    divided = ((torch.arange(len(wavelengths)) - first) / (last - first)).clamp(0.0, 1.0)
    return divided / (scaling.factor * wavelengths) + (1 - divided) / wavelengths
