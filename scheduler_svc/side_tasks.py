"""What runs beside the server, for as long as the scheduler serves."""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self


class SideTasks:
    """Tasks that run until the `async with` ends; the first that ends by itself sets `stop`."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop
        self._tasks: list[asyncio.Task[None]] = []

    def run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start one more."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(lambda _: self._stop.set())
        self._tasks.append(task)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End them; raise what one has failed of, unless something else is being raised."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if exc_type is None:
            for task in self._tasks:
                if not task.cancelled():
                    await task
