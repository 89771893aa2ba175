"""The `Execute` streams that are open; one at a time is its scheduler's."""

import asyncio
from dataclasses import dataclass, field

from contract.errors import QuireError
from gpu_worker.service.attachments import Attachment, Attachments
from gpu_worker.service.result_stream import ResultStream


@dataclass(slots=True, eq=False)
class Execution:
    """One call of `Execute`."""

    results: ResultStream
    attachment: Attachment | None = None
    """Whose steps it sends; known from its first batch."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Executions:
    """All of them. Used from one event loop."""

    def __init__(self) -> None:
        self._open: set[Execution] = set()

    def __len__(self) -> int:
        return len(self._open)

    def begin(self) -> Execution:
        """One is opened."""
        execution = Execution(ResultStream())
        self._open.add(execution)
        return execution

    def end(self, execution: Execution) -> None:
        """One has ended."""
        execution.results.close()
        self._open.remove(execution)
        execution.ended.set()

    def supersede(self, attachments: Attachments) -> None:
        """Somebody has attached: end those of before at once."""
        for execution in self._open:
            execution.results.abandon(attachments.superseded(execution.attachment))

    async def wait_ended(self) -> None:
        """Wait until those that are open now have ended."""
        await asyncio.gather(*(each.ended.wait() for each in tuple(self._open)))

    async def end_all(self, error: QuireError, within_s: float | None = None) -> None:
        """End each with `error`, after the results that it owes; after `within_s` without those."""
        executions = tuple(self._open)
        for execution in executions:
            execution.results.end(error)
        try:
            async with asyncio.timeout(within_s):
                await self.wait_ended()
        except TimeoutError:
            for execution in executions:
                execution.results.abandon(error)
