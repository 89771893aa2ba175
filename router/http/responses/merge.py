"""Many event streams as one: the prompts of one completions call, as their events come."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import suppress

from contract.outputs import Event


async def merge(
    streams: Sequence[AsyncIterator[Event]],
) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield (position of the stream, event) until all streams have ended.

    Keeps the order within a stream. Holds at most one event of each stream that is not yet asked
    for, so a slow reader slows the streams. The first exception of any stream is raised. The caller
    closes this generator (`contextlib.aclosing`) and, after it, the streams.
    """
    if len(streams) == 1:  # nearly always: no task and no queue between producer and reader
        async for event in streams[0]:
            yield 0, event
        return

    merged: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue(len(streams))

    async def pump(position: int, stream: AsyncIterator[Event]) -> None:
        try:
            async for event in stream:
                await merged.put((position, event))
        except Exception as error:  # noqa: BLE001 - raised again by the reader
            await merged.put((position, error))
        else:
            await merged.put((position, None))

    pumps = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        num_live = len(streams)
        while num_live:
            position, news = await merged.get()
            if news is None:
                num_live -= 1
            elif isinstance(news, Exception):
                raise news
            else:
                yield position, news
    finally:
        for task in pumps:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*pumps, return_exceptions=True)
