"""Makes a standby scheduler wait until no worker has a live scheduler.

Workers obey only the newest epoch. So a standby that takes over too early does no harm: the workers
refuse the plans of the former scheduler, and the former scheduler ends.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import grpc.aio
import structlog

from quire.v1 import worker_pb2, worker_pb2_grpc
from rpc.peers.channel import open_channel
from rpc.peers.discovery import Discovery, keep_members
from rpc.security.tls import ClientTls

if TYPE_CHECKING:
    from scheduler_svc.lease import Lease

_POLL_INTERVAL_S: Final = 0.1
_POLL_TIMEOUT_S: Final = 0.5
_CUT_OFF_S: Final = 1.0
"""How long a takeover waits after a scheduler has reported that all its routers are silent. A
scheduler reports this when its routers have been silent for `SILENT_AFTER_S`. So a
takeover needs about two seconds in which all routers are silent."""
_SILENCE_WITH_FREE_LEASE_S: Final = 1.0
"""How long a scheduler may be silent before a takeover, while the Lease is free."""
_NEW_WORKER_S: Final = 2.0
"""How long a standby waits before it takes a worker that has never had a scheduler. In this time
the serving scheduler can attach the worker: it tries twice a second to attach such a worker."""

log = structlog.get_logger()


async def wait_for_vacancy(
    workers: Discovery,
    absence_s: float,
    silence_s: float,
    tls: ClientTls | None = None,
    lease: "Lease | None" = None,
) -> int:
    """Wait until some workers answer, and none of them has a live scheduler.

    Without a Lease, several standbys may stop waiting at the same time. Then the workers obey the
    standby with the newest epoch, and refuse the other standbys.

    Args:
        workers: Finds the workers.
        absence_s: How long a worker must have had no stream to a scheduler before its scheduler
            counts as dead.
        silence_s: How long a scheduler with a stream to a worker must have been silent before it
            counts as dead.
        tls: The TLS settings for calls to workers; None: plaintext.
        lease: The Lease to claim before this call returns; None: there is no Lease.

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
        # A new worker has never had a scheduler, so the workers that have had one decide, if there
        # are any.
        judged = [watch for watch in reached if watch.epoch] or reached
        if judged and all(watch.is_vacant for watch in judged):
            vacant.set()
        else:
            vacant.clear()

    def join(target: str) -> _Watch:
        watches.append(_Watch(target, absence_s, silence_s, tls, lease, judge))
        return watches[-1]

    async def wait_for_turn() -> None:
        await vacant.wait()
        while lease is not None:
            if await lease.claim() and vacant.is_set():
                return
            await asyncio.sleep(_POLL_INTERVAL_S)
            await vacant.wait()

    members = asyncio.create_task(
        keep_members(workers, join=join, may_leave=lambda _: True, left=watches.remove)
    )
    waiting = asyncio.create_task(wait_for_turn())
    try:
        await asyncio.wait((members, waiting), return_when=asyncio.FIRST_COMPLETED)
        if members.done():
            await members
    finally:
        for task in (members, waiting):
            task.cancel()
        await asyncio.gather(members, waiting, return_exceptions=True)
    log.warning(
        "taking over, because no worker has a live scheduler",
        quiet_s={watch.target: round(watch.quiet_s, 1) for watch in watches if watch.is_reached},
    )
    return max(watch.epoch for watch in watches)


class _Watch:
    """Polls one worker, and measures how long its scheduler has been silent.

    The silence grows by `_POLL_INTERVAL_S` with each answer that shows no new heartbeat of the
    scheduler. So time in which the standby itself was suspended, or the worker was too busy to
    answer, does not count as silence.
    """

    def __init__(
        self,
        target: str,
        absence_s: float,
        silence_s: float,
        tls: ClientTls | None,
        lease: "Lease | None",
        on_poll: Callable[[], None],
    ) -> None:
        self.target = target
        self.epoch = 0
        """The newest epoch that the worker has seen."""
        self.is_reached: bool | None = None
        """Whether the worker has answered recently; None: not yet known."""
        self.quiet_s = 0.0
        """How long the worker has had no message from a scheduler."""
        self.is_vacant = False
        self._absence_s = absence_s
        self._silence_s = silence_s
        self._tls = tls
        self._lease = lease
        self._on_poll = on_poll
        self._heartbeats: tuple[int, int] | None = None
        """The epoch and the number of heartbeats in the last answer."""
        self._unanswered_s = 0.0

    async def run(self) -> None:
        """Poll until cancelled."""
        async with open_channel(self.target, tls=self._tls) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]
            while True:
                await self._poll(stub)
                self._on_poll()
                await asyncio.sleep(_POLL_INTERVAL_S)

    async def _poll(self, stub: worker_pb2_grpc.WorkerServiceStub) -> None:
        try:
            answer = await stub.DescribeDevice(
                worker_pb2.DescribeDeviceRequest(), timeout=_POLL_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            is_silent = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            self._unanswered_s += _POLL_TIMEOUT_S if is_silent else _POLL_INTERVAL_S
            if self._unanswered_s >= self._silence_s:
                self.is_reached, self._heartbeats = False, None
        else:
            self._on_answer(answer)

    def _on_answer(self, answer: worker_pb2.DescribeDeviceResponse) -> None:
        heartbeats = (answer.epoch, answer.num_heartbeats)
        if self._heartbeats is None:
            self.quiet_s = 0.0
        # Older workers do not count heartbeats.
        has_advanced = heartbeats != self._heartbeats or not answer.num_heartbeats
        if answer.has_scheduler and answer.is_cut_off:
            limit_s, has_advanced = min(_CUT_OFF_S, self._silence_s), False
        elif answer.has_scheduler:
            limit_s = self._silence_s
        else:
            limit_s = self._absence_s if answer.epoch else max(self._absence_s, _NEW_WORKER_S)
        if self._lease is not None and self._lease.is_free:
            most_s = _SILENCE_WITH_FREE_LEASE_S if answer.has_scheduler else 0.0
            limit_s = min(limit_s, most_s)
        if answer.has_scheduler and has_advanced:
            self.quiet_s = 0.0
        else:
            self.quiet_s += _POLL_INTERVAL_S
        self.is_vacant = self.quiet_s >= limit_s
        self.epoch, self.is_reached = answer.epoch, True
        self._heartbeats, self._unanswered_s = heartbeats, 0.0
