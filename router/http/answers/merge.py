"""Merges the event streams of a call's prompts, in order of arrival."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import suppress

from contract.outputs import Event


async def merge(
    streams: Sequence[AsyncIterator[Event]],
) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield (position of the stream, event) until all streams have ended.

    Keeps the order within a stream. Holds at most one unread event of each stream, so a slow
    reader slows the streams. The first exception of any stream is raised. The caller
    closes this generator (`contextlib.aclosing`) and, after it, the streams.
    """
    if len(streams) == 1:  # nearly always: no task or queue in between
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
            position, item = await merged.get()
            if item is None:
                num_live -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield position, item
    finally:
        for task in pumps:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*pumps, return_exceptions=True)
