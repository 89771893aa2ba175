"""Several asynchronous streams as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

_T = TypeVar("_T")


async def merged(streams: Sequence[AsyncGenerator[_T]]) -> AsyncGenerator[_T]:
    """Yield what comes from any, as it comes; raise the first error when all have ended."""
    news: asyncio.Queue[tuple[_T] | None] = asyncio.Queue()

    async def read(stream: AsyncGenerator[_T]) -> None:
        try:
            async with aclosing(stream):
                async for each in stream:
                    news.put_nowait((each,))
        finally:
            news.put_nowait(None)

    tasks = [asyncio.create_task(read(stream)) for stream in streams]
    try:
        num_going = len(tasks)
        while num_going:
            told = await news.get()
            if told is None:
                num_going -= 1
            else:
                yield told[0]
        for task in tasks:
            await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
