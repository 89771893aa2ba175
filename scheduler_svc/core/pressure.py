"""How many sequences may run while the memory of a worker's device is short.

Nothing is refused or lost. A sequence that may not start waits in its place; one that is preempted
draws the same tokens later. How much of prompts a step may have then, `budget.py` decides.
"""

from contract.info import MemoryLevel

_HALVE_AGAIN_S = 10.0
"""Longer than a worker's level takes to follow its memory. Chosen, not measured."""


class Pressure:
    """The level, and the bound of sequences that follows from it. One, or one search, may run.

    WARNING     no more run than when it came; one that ends makes room for the next.
    CRITICAL    half of those that run, and half of these again for each ten seconds that it lasts.
    OK          no bound, at once. On the way there, at WARNING, the bound stays where it was; if it
                becomes CRITICAL again, the ten seconds are not up sooner.
    """

    def __init__(self) -> None:
        self.level = MemoryLevel.OK
        self.max_running: int | None = None
        """Most sequences that may run; None: no bound."""
        self._halved_at: float | None = None

    def set_level(self, level: MemoryLevel, num_running: int) -> None:
        """Take the level, which may be the same, and how many run at that moment."""
        if level is MemoryLevel.OK:
            self.max_running = self._halved_at = None
        elif self.max_running is None:
            self.max_running = max(1, num_running)
        self.level = level

    def lower_bound(self, now: float, num_running: int) -> None:
        """Halve the bound of sequences if the level is CRITICAL and it is time to."""
        if self.level is not MemoryLevel.CRITICAL or self.max_running is None:
            return
        if self._halved_at is None or now >= self._halved_at + _HALVE_AGAIN_S:
            self._halved_at = now
            self.max_running = max(1, min(self.max_running, num_running) // 2)
