"""Which labels the scheduler keeps, and until when: for the next one to be told.

A worker never evicts, so a pin means nothing to it. It is a fact about a name, not about a block:
it holds wherever what is named so may be, and nothing has to be done when that moves.
"""

import time
from collections.abc import Callable, Iterable


class LabelPins:
    """The pins of all tiers; those that would end first are forgotten when there are too many."""

    def __init__(self, max_pins: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_pins = max_pins
        """As there are blocks; which pins it gives up, a scheduler does not say."""
        self._clock = clock
        self._ends: dict[bytes, float] = {}  # in the order of naming

    def pin(self, pins: Iterable[tuple[bytes, float]]) -> None:
        """Note for how many seconds from now each label is kept."""
        now = self._clock()
        for label, seconds in pins:
            self._ends.pop(label, None)
            self._ends[label] = now + seconds
        if len(self._ends) > self.max_pins:
            by_end = sorted(self._ends, key=self._ends.__getitem__)
            # More than must be, or every step that pins would sort them all.
            most = self.max_pins - self.max_pins // 8
            for index, label in enumerate(by_end):
                if len(by_end) - index <= most and self._ends[label] > now:
                    break
                del self._ends[label]

    def held(self) -> tuple[tuple[bytes, float], ...]:
        """Return the labels whose time is not over, and how many seconds are left."""
        now = self._clock()
        return tuple((label, end - now) for label, end in self._ends.items() if end > now)

    def clear(self) -> None:
        """Forget all."""
        self._ends.clear()
