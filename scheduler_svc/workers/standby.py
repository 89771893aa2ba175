"""Standing by: watches the workers until none has a scheduler that is alive.

Workers obey only the newest epoch. So if a standby takes over too early, nothing is written twice:
the scheduler that it replaces finds itself fenced and ends.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import grpc.aio
import structlog

from quire.v1 import worker_pb2, worker_pb2_grpc
from rpc.peers.channel import open_channel
from rpc.peers.discovery import Discovery, keep_members
from rpc.security.tls import ClientTls

_LOOK_INTERVAL_S: Final = 0.1
_LOOK_TIMEOUT_S: Final = 0.5
_FIRST_S: Final = 2.0
"""How long a worker that has just started waits for the scheduler that serves, which tries twice a
second to attach it."""

log = structlog.get_logger()


async def wait_for_vacancy(
    workers: Discovery, absence_s: float, silence_s: float, tls: ClientTls | None = None
) -> int:
    """Wait until workers can be reached, and none has a scheduler that is alive.

    Several standbys may return at once: the workers obey the newest epoch, and the other standbys
    then find theirs stale.

    Args:
        workers: Finds the workers.
        absence_s: For how long a worker must have had no scheduler's stream.
        silence_s: For how long the scheduler must have been silent that has a stream.
        tls: For calls to workers; None: plaintext.

    Returns:
        The newest epoch that a worker has seen.
    """
    log.info("standing by", workers=await workers.targets())
    watches: list[_Watch] = []
    vacant = asyncio.Event()

    def judge() -> None:
        if any(watch.is_reached is None for watch in watches):
            return
        reached = [watch for watch in watches if watch.is_reached]
        # One that has just started says nothing about a scheduler that others have.
        judged = [watch for watch in reached if watch.epoch] or reached
        if judged and all(watch.is_vacant for watch in judged):
            vacant.set()

    def join(target: str) -> _Watch:
        watches.append(_Watch(target, absence_s, silence_s, tls, judge))
        return watches[-1]

    members = asyncio.create_task(
        keep_members(workers, join=join, may_leave=lambda _: True, left=watches.remove)
    )
    waiting = asyncio.create_task(vacant.wait())
    try:
        await asyncio.wait((members, waiting), return_when=asyncio.FIRST_COMPLETED)
        if members.done():
            await members
    finally:
        for task in (members, waiting):
            task.cancel()
        await asyncio.gather(members, waiting, return_exceptions=True)
    log.warning(
        "no worker has a scheduler that is alive: taking over",
        quiet_s={watch.target: round(watch.quiet_s, 1) for watch in watches if watch.is_reached},
    )
    return max(watch.epoch for watch in watches)


class _Watch:
    """Looks at one worker again and again, and counts how long its scheduler has been away.

    Time is counted in looks, not by the clock: a standby that was itself stopped or starved has not
    looked. And it is counted by what the worker answers: one that is too busy to answer has not
    heard its scheduler either.
    """

    def __init__(
        self,
        target: str,
        absence_s: float,
        silence_s: float,
        tls: ClientTls | None,
        on_look: Callable[[], None],
    ) -> None:
        self.target = target
        self.epoch = 0
        """The newest that the worker has seen."""
        self.is_reached: bool | None = None
        """Whether it has answered recently; None: it may still answer for the first time."""
        self.quiet_s = 0.0
        """For how long it has had no sign of life of a scheduler."""
        self.is_vacant = False
        self._absence_s = absence_s
        self._silence_s = silence_s
        self._tls = tls
        self._on_look = on_look
        self._beats: tuple[int, int] | None = None
        """Epoch and number of beats, when it last answered."""
        self._unanswered_s = 0.0

    async def run(self) -> None:
        """Look until cancelled."""
        async with open_channel(self.target, tls=self._tls) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]
            while True:
                await self._look(stub)
                self._on_look()
                await asyncio.sleep(_LOOK_INTERVAL_S)

    async def _look(self, stub: worker_pb2_grpc.WorkerServiceStub) -> None:
        try:
            found = await stub.DescribeDevice(
                worker_pb2.DescribeDeviceRequest(), timeout=_LOOK_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            is_silent = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            self._unanswered_s += _LOOK_TIMEOUT_S if is_silent else _LOOK_INTERVAL_S
            if self._unanswered_s >= self._silence_s:
                self.is_reached, self._beats = False, None
        else:
            self._take(found)

    def _take(self, found: worker_pb2.DescribeDeviceResponse) -> None:
        beats = (found.epoch, found.num_beats)
        if self._beats is None:
            self.quiet_s = 0.0
        has_beaten = beats != self._beats or not found.num_beats  # an older worker does not count
        if found.has_scheduler:
            limit_s = self._silence_s
        else:
            limit_s = self._absence_s if found.epoch else max(self._absence_s, _FIRST_S)
        if found.has_scheduler and has_beaten:
            self.quiet_s = 0.0
        else:
            self.quiet_s += _LOOK_INTERVAL_S
        self.is_vacant = self.quiet_s >= limit_s
        self.epoch, self.is_reached = found.epoch, True
        self._beats, self._unanswered_s = beats, 0.0
