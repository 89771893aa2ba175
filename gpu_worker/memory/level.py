"""How short memory is, by how much of it can still be had. Needs no torch, as the server does not.

A level that is worse counts at once. A better one counts when every reading of a while was better:
what is done about a level changes what is read, and must not be undone by the first sign of that.
"""

from dataclasses import dataclass
from typing import Protocol

from contract.info import MemoryLevel

_NUM_CALM = 5
"""Readings, each better than the level, after which it is left."""
_WARNING_SHARE = 0.03
_CRITICAL_SHARE = 0.01


class WatchedMemory(Protocol):
    """What is asked for the level; from any thread."""

    @property
    def level(self) -> MemoryLevel | None:
        """How short memory is; None: it is not watched."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Shares of all memory; if less than that can be had, it is short."""

    warning: float
    critical: float

    def level(self, available: int, total: int) -> MemoryLevel:
        """Return what `available` of `total` bytes are."""
        if available < self.critical * total:
            return MemoryLevel.CRITICAL
        return MemoryLevel.WARNING if available < self.warning * total else MemoryLevel.OK


def choose_thresholds(
    warning: float | None, critical: float | None, available: int, total: int
) -> Thresholds:
    """Take what the operator says; else 3 % and 1 %, or less on a device that is full by plan.

    Args:
        warning: Share of all memory; None: nobody says. At least that of `critical`.
        critical: Likewise; at most that of `warning`.
        available: Bytes that can be had when the worker is ready. A level that the planned use
            brings about, with half of this still there, would be none to act on.
        total: All bytes.
    """
    at_first = available / total if total else 0.0
    if warning is None:
        warning = max(min(_WARNING_SHARE, at_first / 2), critical or 0.0)
    if critical is None:
        critical = min(_CRITICAL_SHARE, at_first / 4, warning)
    return Thresholds(warning, critical)


class LevelMeter:
    """Follows the readings of one memory."""

    def __init__(self) -> None:
        self.level = MemoryLevel.OK
        self._calm: list[MemoryLevel] = []  # the last readings, as long as each was better

    def take(self, read: MemoryLevel) -> MemoryLevel:
        """Take one more reading; return the level, which may have changed."""
        if read.value >= self.level.value:
            self.level, self._calm = read, []
            return self.level
        self._calm.append(read)
        if len(self._calm) == _NUM_CALM:
            self.level, self._calm = max(self._calm, key=lambda level: level.value), []
        return self.level
