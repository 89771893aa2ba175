"""Derives the level of memory pressure from how much memory is available. Needs no torch.

A worse level takes effect at once. A better level takes effect only after several better readings
in a row. When memory is short, the scheduler runs fewer sequences, and the readings get better. If
one better reading were enough, the level would then go up and down all the time.
"""

from dataclasses import dataclass
from typing import Protocol

from contract.info import MemoryLevel

_NUM_BETTER = 5
"""The level becomes better after this many readings in a row that are better than the level."""
_WARNING_SHARE = 0.03
_CRITICAL_SHARE = 0.01


class WatchedMemory(Protocol):
    """Reports the level of memory pressure, to any thread."""

    @property
    def level(self) -> MemoryLevel | None:
        """How short memory is; None if the memory is not watched."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Shares of the total memory: if less is available, the level is WARNING or CRITICAL."""

    warning: float
    critical: float

    def level(self, available: int, total: int) -> MemoryLevel:
        """Return the level if `available` of `total` bytes are available."""
        if available < self.critical * total:
            return MemoryLevel.CRITICAL
        return MemoryLevel.WARNING if available < self.warning * total else MemoryLevel.OK


def choose_thresholds(
    warning: float | None, critical: float | None, available: int, total: int
) -> Thresholds:
    """Return the operator's thresholds; defaults are 3 % and 1 %, or less on an almost full device.

    Args:
        warning: The operator's threshold for WARNING, as a share of `total`; at least `critical`;
            None: not set.
        critical: The operator's threshold for CRITICAL, as a share of `total`; at most `warning`;
            None: not set.
        available: Available bytes when the worker is ready. The default thresholds are so low that
            the worker can use half of these bytes before memory counts as short.
        total: All bytes of the memory.
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
        self._better: list[MemoryLevel] = []  # the last readings in a row better than the level

    def add(self, read: MemoryLevel) -> MemoryLevel:
        """Add a reading, and return the new level."""
        if read.value >= self.level.value:
            self.level, self._better = read, []
            return self.level
        self._better.append(read)
        if len(self._better) == _NUM_BETTER:
            self.level, self._better = max(self._better, key=lambda level: level.value), []
        return self.level
