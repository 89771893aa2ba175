"""Ratios of rounds that took turns: their median, and how far they lie apart."""

from collections.abc import Mapping, Sequence
from statistics import median


def ratio_metrics(name_to_ratios: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each, and its least and greatest; each is ascending."""
    metrics: dict[str, float] = {}
    for name, ratios in name_to_ratios.items():
        metrics |= {name: median(ratios), f"{name}_min": ratios[0], f"{name}_max": ratios[-1]}
    return metrics


def ratio_text(ratios: Sequence[float]) -> str:
    """The same as text."""
    return f"{median(ratios):.3f}  ({ratios[0]:.3f} … {ratios[-1]:.3f})"
