"""Asynchronous streams and background tasks."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc.aio

from rpc.status import calling

_T = TypeVar("_T")


class BackgroundTasks:
    """Tasks that outlive their caller, until `stop`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def is_busy(self) -> bool:
        """Whether a task is running."""
        return bool(self._tasks)

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of `work`, which continues if the caller is cancelled."""
        return await asyncio.shield(self.start(work))

    def start(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Start a task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(retrieve)
        return task

    def stop(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks:
            task.cancel()


class SideTasks:
    """Tasks that run beside the server until the `async with` ends.

    A task that ends early sets `stop`.
    """

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop
        self._tasks: list[asyncio.Task[None]] = []

    def run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start a task."""
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
        """Cancel the tasks; raise a failed task's error, unless the `with` body raised one."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if exc_type is None:
            for task in self._tasks:
                if not task.cancelled():
                    await task


def retrieve(task: asyncio.Task[Any]) -> None:
    """Retrieve a task's error, so that asyncio does not log that it was never retrieved."""
    if not task.cancelled():
        task.exception()


async def merged(streams: Sequence[AsyncGenerator[_T]]) -> AsyncGenerator[_T]:
    """Yield the items of all streams as they arrive; at the end, raise a failed stream's error."""
    queue: asyncio.Queue[tuple[_T] | None] = asyncio.Queue()

    async def read(stream: AsyncGenerator[_T]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    queue.put_nowait((item,))
        finally:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(read(stream)) for stream in streams]
    try:
        num_open = len(tasks)
        while num_open:
            entry = await queue.get()
            if entry is None:
                num_open -= 1
            else:
                yield entry[0]
        for task in tasks:
            await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def responses(call: grpc.aio.UnaryStreamCall[Any, Any]) -> AsyncGenerator[Any]:
    """Yield the messages of a streaming call. Closing the generator cancels the call.

    Raises:
        QuireError: The peer's error, or UnavailableError if the peer is lost.
    """
    try:
        with calling():
            while (message := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                yield message
    finally:
        call.cancel()
