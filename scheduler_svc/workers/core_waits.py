"""Who waits until something is true of a core."""

import asyncio
from collections.abc import Callable

from contract.errors import UnavailableError
from scheduler_svc.core.scheduler import Scheduler

Condition = Callable[[Scheduler], bool]
"""What is waited for; it changes nothing."""


class CoreWaits:
    """The conditions of one attachment that are waited for."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Condition, asyncio.Future[None]]] = []

    async def wait(self, condition: Condition) -> None:
        """Return when `look` finds that it holds.

        Raises:
            UnavailableError: What `lost` is told, before that.
        """
        holds = asyncio.get_running_loop().create_future()
        self._waiting.append((condition, holds))
        await holds

    def look(self, core: Scheduler) -> None:
        """Wake those whose condition holds."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for condition, holds in waiting:
            if holds.done():  # who waited has gone
                continue
            if condition(core):
                holds.set_result(None)
            else:
                self._waiting.append((condition, holds))

    def lost(self, error: UnavailableError) -> None:
        """Tell those who still wait that they do so in vain."""
        waiting, self._waiting = self._waiting, []
        for _, holds in waiting:
            if not holds.done():
                holds.set_exception(error)
