"""How a scheduler takes over workers: it picks an epoch, waits its turn, and attaches each worker.

A worker obeys only the newest epoch that it has seen.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Final

import grpc.aio
import structlog

from contract.codec.info import worker_info_from_proto
from contract.codec.state import check_holdings, holdings_from_proto
from contract.errors import InvalidArgumentError, StaleEpochError, UnavailableError
from contract.info import WorkerInfo
from contract.state import Holdings
from quire.v1 import worker_pb2, worker_pb2_grpc
from rpc.peers.channel import open_channel
from rpc.peers.discovery import Discovery
from rpc.security.tls import ClientTls
from scheduler_svc.workers.stream import WorkerClientConfig, WorkerLink, unavailable

_POLL_TIMEOUT_S: Final = 1.0
_POLL_INTERVAL_S: Final = 0.2
_ATTACH_TIMEOUT_S: Final = 10.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Claim:
    """What a worker reports about its scheduler."""

    epoch: int
    has_scheduler: bool


async def next_epoch(workers: Discovery, tls: ClientTls | None = None) -> int:
    """Return an epoch newer than any that the reachable workers have seen.

    The wall clock in milliseconds, unless an earlier scheduler's clock was ahead of this one.
    """
    newest = max((claim.epoch for claim in await _poll(workers, tls)), default=0)
    return max(time.time_ns() // 1_000_000, newest + 1)


async def wait_for_vacancy(
    workers: Discovery, absence_s: float, tls: ClientTls | None = None
) -> None:
    """Wait until workers can be reached and none has had a scheduler for `absence_s`.

    Several standbys may return at once: the workers obey the newest epoch, and the other standbys
    then find theirs stale.
    """
    log.info("standing by", workers=await workers.targets())
    loop = asyncio.get_running_loop()
    vacant_since_s: float | None = None
    while True:
        claims = await _poll(workers, tls)
        # A worker too busy to answer neither confirms nor disproves the vacancy.
        if any(claim.has_scheduler for claim in claims):
            vacant_since_s = None
        elif claims and vacant_since_s is None:
            vacant_since_s = loop.time()
        elif claims and vacant_since_s is not None and loop.time() - vacant_since_s >= absence_s:
            log.warning("no worker has a scheduler: taking over", absent_for_s=absence_s)
            return
        await asyncio.sleep(_POLL_INTERVAL_S)


async def _poll(workers: Discovery, tls: ClientTls | None) -> list[_Claim]:
    """Ask all workers; leaves out those that do not answer."""
    claims = await asyncio.gather(*(_poll_one(target, tls) for target in await workers.targets()))
    return [claim for claim in claims if claim is not None]


async def _poll_one(target: str, tls: ClientTls | None) -> _Claim | None:
    async with open_channel(target, tls=tls) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            state = await stub.DescribeDevice(
                worker_pb2.DescribeDeviceRequest(), timeout=_POLL_TIMEOUT_S
            )
        except grpc.aio.AioRpcError:
            return None
        return _Claim(state.epoch, state.has_scheduler)


class WorkerUnloadedError(UnavailableError):
    """The worker now belongs to this scheduler, but has no model."""


async def attach(config: WorkerClientConfig, wake: asyncio.Event, step_id_base: int) -> WorkerLink:
    """Claim the worker and open its Execute stream.

    Args:
        config: The worker and our epoch.
        wake: Set whenever the link has something new; see `WorkerLink`.
        step_id_base: Added to the plans' step ids. These restart with each attachment, but on the
            wire they must grow for as long as the epoch lasts.

    Raises:
        StaleEpochError: A newer scheduler has the worker.
        WorkerUnloadedError: The worker has no model; it is claimed nevertheless.
        UnavailableError: The worker cannot be reached, is not ready, or sends invalid data.
    """
    channel = open_channel(config.target, config.max_message_mb, config.tls)
    try:
        info = await _claim(channel, config)
        holdings = await _read_holdings(channel, config, info)
    except BaseException:
        await channel.close(None)
        raise
    return WorkerLink(config, channel, info, holdings, wake, step_id_base)


async def _claim(channel: grpc.aio.Channel, config: WorkerClientConfig) -> WorkerInfo:
    try:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]
        response = await stub.Attach(
            worker_pb2.AttachRequest(epoch=config.epoch, scheduler_id=config.scheduler_id),
            timeout=_ATTACH_TIMEOUT_S,
        )
        if response.is_unloaded:
            raise WorkerUnloadedError("its model is unloaded")
        return worker_info_from_proto(response.worker)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            raise StaleEpochError(error.details() or "the worker has a newer scheduler") from error
        raise unavailable(error) from error
    except InvalidArgumentError as error:
        raise UnavailableError(f"it describes itself wrongly: {error}") from error


async def _read_holdings(
    channel: grpc.aio.Channel, config: WorkerClientConfig, info: WorkerInfo
) -> Holdings:
    stub = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]
    call = stub.ReadHoldings(
        worker_pb2.ReadHoldingsRequest(epoch=config.epoch), timeout=_ATTACH_TIMEOUT_S
    )
    try:
        holdings = holdings_from_proto([part async for part in call])
        check_holdings(holdings, info)
    except grpc.aio.AioRpcError as error:
        raise unavailable(error) from error
    except InvalidArgumentError as error:
        raise UnavailableError(f"it says wrongly what it holds: {error}") from error
    return holdings
