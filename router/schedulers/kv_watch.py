"""Merges all schedulers' streams of KV events."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from contract.errors import QuireError, UnimplementedError
from quire.v1 import kv_pb2
from router.schedulers.pool import Schedulers

_LOOK_S: Final = 0.25
"""How often to look for schedulers that are not watched yet."""
_MAX_UNREAD: Final = 16
"""How many unread messages the router keeps for a caller of `watch_kv`. Further messages wait at
the schedulers, which limit how many changes of blocks wait."""


async def watch_kv(
    schedulers: Schedulers, worker: str = ""
) -> AsyncGenerator[kv_pb2.WatchKvResponse]:
    """Yield the KV events of one worker or, if `worker` is empty, of all workers.

    The generator continues when a scheduler is replaced. When a scheduler is lost, the generator
    yields `KvCacheCleared` for each of the scheduler's workers, except for workers that a newer
    scheduler already reports.

    Raises:
        UnimplementedError: A scheduler was started without --kv-events.
        UnavailableError: No scheduler is connected.
    """
    unread: asyncio.Queue[kv_pb2.WatchKvResponse | QuireError] = asyncio.Queue(_MAX_UNREAD)
    watches = _Watches(schedulers, worker, unread)
    looking = asyncio.create_task(watches.keep())
    try:
        while True:
            message = await unread.get()
            if isinstance(message, QuireError):
                raise message
            yield message
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


class _Watches:
    """For each connected scheduler, runs a task that reads the scheduler's events."""

    def __init__(
        self,
        schedulers: Schedulers,
        worker: str,
        unread: "asyncio.Queue[kv_pb2.WatchKvResponse | QuireError]",
    ) -> None:
        self._schedulers = schedulers
        self._worker = worker
        self._unread = unread
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._epochs: dict[str, int] = {}
        """Maps each worker to the epoch of its newest scheduler; events of older schedulers are
        dropped."""

    async def keep(self) -> None:
        """Watch all connected schedulers, until cancelled."""
        try:
            if not self._schedulers.target_to_calls:
                await self._unread.put(self._schedulers.unavailable())
            while True:
                for target in self._schedulers.target_to_calls:
                    if target not in self._tasks or self._tasks[target].done():
                        self._tasks[target] = asyncio.create_task(self._watch(target))
                await asyncio.sleep(_LOOK_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _watch(self, target: str) -> None:
        last: dict[str, kv_pb2.WatchKvResponse] = {}
        try:
            calls = self._schedulers.target_to_calls[target]
            async with aclosing(calls.watch_kv(self._worker)) as messages:
                async for message in messages:
                    if message.epoch >= self._epochs.get(message.worker, 0):
                        self._epochs[message.worker] = message.epoch
                        last[message.worker] = message
                        await self._unread.put(message)
        except QuireError as error:
            if isinstance(error, UnimplementedError):
                await self._unread.put(
                    UnimplementedError(f"the scheduler at {target} was started without --kv-events")
                )
        for worker, message in last.items():
            if message.epoch == self._epochs[worker]:
                await self._unread.put(_cleared(message))


def _cleared(last: kv_pb2.WatchKvResponse) -> kv_pb2.WatchKvResponse:
    """Return a message with `KvCacheCleared` for a worker; `last` is the worker's last message."""
    return kv_pb2.WatchKvResponse(
        worker=last.worker,
        epoch=last.epoch,
        sequence=last.sequence,
        events=[kv_pb2.KvEvent(cleared=kv_pb2.KvCacheCleared())],
    )
