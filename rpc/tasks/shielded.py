"""Work that goes on if its caller leaves."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class Finishing:
    """What is under way of one owner's."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._tasks)

    async def finish(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Give what comes of it; who is cancelled meanwhile leaves it to itself."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(retrieve)
        return await asyncio.shield(task)

    def stop(self) -> None:
        """Give it all up."""
        for task in self._tasks:
            task.cancel()


def retrieve(task: asyncio.Task[Any]) -> None:
    """Look at how a task ended, else asyncio complains if nobody waits for it any more."""
    if not task.cancelled():
        task.exception()
