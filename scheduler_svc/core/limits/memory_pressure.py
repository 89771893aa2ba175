"""Limits how many sequences run while the memory of a worker's device is short.

No request is refused or lost: a sequence that may not start keeps its position in the queue, and
a preempted one draws the same tokens later. While the memory is short, steps also compute fewer
prompt tokens (`budget.py`).
"""

from contract.info import MemoryLevel

_HALVE_AGAIN_S = 10.0
"""Least number of seconds between two halvings of the bound on running sequences, so that the
effect of the first one shows in the memory level before the second. Chosen, not measured."""


class Pressure:
    """The memory level, and the bound on running sequences that follows from it.

    WARNING     as many sequences may run as ran when the level rose
    CRITICAL    half of the running sequences may run; the bound is halved every ten seconds
    OK          there is no bound

    One sequence, or one beam search, may always run. When the level falls from CRITICAL to WARNING,
    the bound stays as it is. If the level becomes CRITICAL again, the bound is halved again, but at
    the earliest ten seconds after the last halving.
    """

    def __init__(self) -> None:
        self.level = MemoryLevel.OK
        self.max_running: int | None = None
        """The bound on running sequences; None: no bound."""
        self._halved_at: float | None = None

    def set_level(self, level: MemoryLevel, num_running: int) -> None:
        """Set the memory level; `num_running` is the number of sequences that run now."""
        if level is MemoryLevel.OK:
            self.max_running = self._halved_at = None
        elif self.max_running is None:
            self.max_running = max(1, num_running)
        self.level = level

    def halve_max_running(self, now: float, num_running: int) -> None:
        """Halve the bound if the level is CRITICAL, but not twice within ten seconds."""
        if self.level is not MemoryLevel.CRITICAL or self.max_running is None:
            return
        if self._halved_at is None or now >= self._halved_at + _HALVE_AGAIN_S:
            self._halved_at = now
            self.max_running = max(1, min(self.max_running, num_running) // 2)
