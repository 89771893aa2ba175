"""How many sequences may run, and how much of prompts a step may have, while memory is short."""

from contract.info import MemoryLevel

_HALVE_AGAIN_S = 10.0
"""Longer than a worker's level takes to follow what its memory does."""


class Pressure:
    """The bounds that a level means, as time goes on. One sequence, or one search, may always run.

    WARNING     no more run than when it came; who ends makes room for the next. Half of the tokens
                of prompts in a step, which need work space.
    CRITICAL    half of those that run, and half of these again for each ten seconds that it lasts.
                A quarter of the tokens.
    OK          no bounds, at once. On the way there, at WARNING, those of sequences are what they
                came to; if it is CRITICAL again, the ten seconds are not up sooner.
    """

    def __init__(self) -> None:
        self.level = MemoryLevel.OK
        self.max_running: int | None = None
        """Most sequences that may run; None: no bound."""
        self._halved_at: float | None = None

    def change(self, level: MemoryLevel, num_running: int) -> None:
        """Learn the level, which may be the same, and how many run at that moment."""
        if level is MemoryLevel.OK:
            self.max_running = self._halved_at = None
        elif self.max_running is None:
            self.max_running = max(1, num_running)
        self.level = level

    def look(self, now: float, num_running: int) -> None:
        """Lower the bound of sequences, if it is time."""
        if self.level is not MemoryLevel.CRITICAL or self.max_running is None:
            return
        if self._halved_at is None or now >= self._halved_at + _HALVE_AGAIN_S:
            self._halved_at = now
            self.max_running = max(1, min(self.max_running, num_running) // 2)

    def max_prompt_tokens(self, max_num_batched_tokens: int) -> int | None:
        """Return most tokens of prompts in a step, of those that it may have at best."""
        if self.level is MemoryLevel.OK:
            return None
        return max(1, max_num_batched_tokens // (2 if self.level is MemoryLevel.WARNING else 4))
