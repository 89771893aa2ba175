"""Who waits until the result of a step has been applied."""

import asyncio

from rpc.errors import UnavailableError
from scheduler_svc.core.plan import StepId


class AwaitedSteps:
    """The steps of one attachment that are waited for."""

    def __init__(self) -> None:
        self._waiting: list[tuple[StepId, asyncio.Future[None]]] = []

    async def wait(self, step: StepId) -> None:
        """Return when `answered` is told of the step, or of a later one.

        Raises:
            UnavailableError: What `lost` is told, before that.
        """
        answered = asyncio.get_running_loop().create_future()
        self._waiting.append((step, answered))
        await answered

    def answered(self, last: StepId) -> None:
        """Wake those who wait for steps up to `last`."""
        waiting, self._waiting = self._waiting, []
        for step, answered in waiting:
            if step > last:
                self._waiting.append((step, answered))
            elif not answered.done():
                answered.set_result(None)

    def lost(self, error: UnavailableError) -> None:
        """Tell those who still wait that they do so in vain."""
        waiting, self._waiting = self._waiting, []
        for _, answered in waiting:
            if not answered.done():
                answered.set_exception(error)
