"""Memory pressure: how short memory is, by how much can still be had. Needs no torch.

A worse level counts at once. A better one counts after several better readings in a row: reacting
to a level changes the readings, and must not be undone by the first of them.
"""

from dataclasses import dataclass
from typing import Protocol

from contract.info import MemoryLevel

_NUM_CALM = 5
"""Better readings in a row that lower the level."""
_WARNING_SHARE = 0.03
_CRITICAL_SHARE = 0.01


class WatchedMemory(Protocol):
    """Reports the level; from any thread."""

    @property
    def level(self) -> MemoryLevel | None:
        """How short memory is; None if it is not watched."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Shares of total memory below which memory is short."""

    warning: float
    critical: float

    def level(self, available: int, total: int) -> MemoryLevel:
        """The level of `available` out of `total` bytes."""
        if available < self.critical * total:
            return MemoryLevel.CRITICAL
        return MemoryLevel.WARNING if available < self.warning * total else MemoryLevel.OK


def choose_thresholds(
    warning: float | None, critical: float | None, available: int, total: int
) -> Thresholds:
    """The operator's thresholds; else 3 % and 1 %, or less on a device that is full by plan.

    Args:
        warning: Share of total memory, at least `critical`; None: not set.
        critical: Share of total memory, at most `warning`; None: not set.
        available: Bytes that can be had when the worker is ready. Using half of that is planned
            use, and must not count as pressure.
        total: All bytes.
    """
    at_first = available / total if total else 0.0
    if warning is None:
        warning = max(min(_WARNING_SHARE, at_first / 2), critical or 0.0)
    if critical is None:
        critical = min(_CRITICAL_SHARE, at_first / 4, warning)
    return Thresholds(warning, critical)


class LevelMeter:
    """Turns readings into a level, with hysteresis."""

    def __init__(self) -> None:
        self.level = MemoryLevel.OK
        self._calm: list[MemoryLevel] = []  # the last readings in a row better than the level

    def take(self, read: MemoryLevel) -> MemoryLevel:
        """Add a reading; returns the level, which may have changed."""
        if read.value >= self.level.value:
            self.level, self._calm = read, []
            return self.level
        self._calm.append(read)
        if len(self._calm) == _NUM_CALM:
            self.level, self._calm = max(self._calm, key=lambda level: level.value), []
        return self.level
