"""When a scheduler may begin, and under which epoch: what the workers say of the one before."""

import asyncio
import time
from dataclasses import dataclass

import grpc.aio
import structlog

from quire.v1 import worker_pb2, worker_pb2_grpc
from rpc.peers.channel import open_channel
from rpc.peers.discovery import Discovery
from rpc.security.tls import ClientTls

_TIMEOUT_S = 1.0
_LOOK_S = 0.2

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Sight:
    """What a worker says of its scheduler."""

    epoch: int
    has_scheduler: bool


async def next_epoch(workers: Discovery, tls: ClientTls | None = None) -> int:
    """Return an epoch newer than any that the workers have seen, as far as they can be reached.

    That is the wall clock in milliseconds, if nobody's clock was ahead of this one.
    """
    newest = max((sight.epoch for sight in await _look(workers, tls)), default=0)
    return max(time.time_ns() // 1_000_000, newest + 1)


async def wait_for_vacancy(
    workers: Discovery, absence_s: float, tls: ClientTls | None = None
) -> None:
    """Return when workers can be reached, and for `absence_s` none of them has had a scheduler.

    Of several that wait, all may return: the workers then obey the newest epoch, and the others
    find theirs stale.
    """
    log.info("standing by", workers=await workers.targets())
    loop = asyncio.get_running_loop()
    vacant_since_s: float | None = None
    while True:
        sights = await _look(workers, tls)
        # Who does not answer, busy as it is, says nothing about what was before.
        if any(sight.has_scheduler for sight in sights):
            vacant_since_s = None
        elif sights and vacant_since_s is None:
            vacant_since_s = loop.time()
        elif sights and vacant_since_s is not None and loop.time() - vacant_since_s >= absence_s:
            log.warning("no worker has a scheduler: taking over", absent_for_s=absence_s)
            return
        await asyncio.sleep(_LOOK_S)


async def _look(workers: Discovery, tls: ClientTls | None) -> list[_Sight]:
    """Ask all workers; those that do not answer are left out."""
    sights = await asyncio.gather(*(_ask(target, tls) for target in await workers.targets()))
    return [sight for sight in sights if sight is not None]


async def _ask(target: str, tls: ClientTls | None) -> _Sight | None:
    async with open_channel(target, tls=tls) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            state = await stub.DescribeDevice(
                worker_pb2.DescribeDeviceRequest(), timeout=_TIMEOUT_S
            )
        except grpc.aio.AioRpcError:
            return None
        return _Sight(state.epoch, state.has_scheduler)
