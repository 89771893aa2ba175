"""Compares sides that take turns, so that a temporary slowdown of the machine affects all of them.

A ratio is taken within a round; a benchmark reports the median of the rounds' ratios, with
the least and the greatest.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

Side = TypeVar("Side")


def turns(sides: Iterable[Side], num_rounds: int, warm_ups: int = 0) -> Iterator[tuple[int, Side]]:
    """Yield (round, side): each side once in a round, in reverse order in every other round.

    Rounds count from 0; warm-up rounds come first, with negative numbers.
    """
    order = list(sides)
    for index in range(-warm_ups, num_rounds):
        for side in reversed(order) if index % 2 else order:
            yield index, side


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, the least and the greatest of some values."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(median(values), min(values), max(values))

    @classmethod
    def of_ratios(cls, above: Sequence[float], below: Sequence[float]) -> "Spread":
        """Return the spread of one side's values ÷ the other side's, round by round."""
        return cls.of([a / b for a, b in zip(above, below, strict=True)])

    def metrics(self, name: str) -> dict[str, float]:
        return {name: self.median, f"{name}_min": self.least, f"{name}_max": self.greatest}

    def __str__(self) -> str:
        return f"{self.median:.3f}  ({self.least:.3f} … {self.greatest:.3f})"
