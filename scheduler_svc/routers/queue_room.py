"""Tells the routers how much room the queues have, as long as that is little.

So that a router under overload refuses by itself, before it has tokenized anything, what would be
refused here. What it is told is a moment old: this scheduler decides.
"""

import asyncio
from collections.abc import Callable
from typing import Final

_LOOK_S: Final = 0.02
"""How old it may be; about a step, in which one sequence or another may end."""


class QueueRoom:
    """Waits for a refusal, and from then on tells, until half of the queues is free."""

    def __init__(
        self, room: Callable[[], int], tell: Callable[[int | None], None], max_waiting: int
    ) -> None:
        """`room` says how many sequences may be submitted, of `max_waiting` at a worker.

        `tell` is given that, or None when nobody need count any more.
        """
        self._room = room
        self._tell = tell
        self._enough = max(1, max_waiting // 2)
        self._refused = asyncio.Event()

    def note_refusal(self) -> None:
        """Note that a request was refused because too many wait."""
        self._refused.set()

    async def run(self) -> None:
        """Tell, until cancelled."""
        while True:
            await self._refused.wait()
            last: int | None = None
            while (room := self._room()) < self._enough:
                # Again even if it is the same: the routers count what they have submitted since.
                if room or last != room:
                    self._tell(room)
                last = room
                await asyncio.sleep(_LOOK_S)
            self._refused.clear()
            if last is not None:
                self._tell(None)
