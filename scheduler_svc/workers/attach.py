"""Attaches a worker: claims it with the scheduler's epoch, and opens its stream of steps.

A worker obeys only the scheduler with the newest epoch that the worker has seen.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

import grpc.aio

from contract.codec.info import worker_info_from_proto
from contract.codec.state import check_holdings, holdings_from_proto
from contract.errors import InvalidArgumentError, StaleEpochError, UnavailableError
from contract.info import WorkerInfo
from contract.liveness.heartbeat import BEAT_S
from contract.state import Holdings
from quire.v1 import worker_pb2, worker_pb2_grpc
from rpc.peers.channel import open_channel
from rpc.peers.discovery import Discovery
from rpc.security.tls import ClientTls
from scheduler_svc.workers.link import WorkerClientConfig, WorkerLink, unavailable

_POLL_TIMEOUT_S: Final = 1.0
_ATTACH_TIMEOUT_S: Final = 10.0


async def newest_epoch(workers: Discovery, tls: ClientTls | None = None) -> int:
    """Ask all workers for the newest epoch that they have seen; return 0 if none has seen one."""

    async def ask(target: str) -> int:
        async with open_channel(target, tls=tls) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]
            try:
                state = await stub.DescribeDevice(
                    worker_pb2.DescribeDeviceRequest(), timeout=_POLL_TIMEOUT_S
                )
            except grpc.aio.AioRpcError:
                return 0
            return int(state.epoch)

    return max(await asyncio.gather(*map(ask, await workers.targets())), default=0)


class WorkerUnloadedError(UnavailableError):
    """The worker was claimed and belongs to this scheduler, but has no model."""


async def attach(config: WorkerClientConfig, wake: asyncio.Event, step_id_base: int) -> WorkerLink:
    """Claim the worker and open its Execute stream.

    Args:
        config: The worker's address, this scheduler's epoch, and other parameters.
        wake: Set when a result has come, when the worker's memory level has changed, and when the
            worker is lost.
        step_id_base: Added to the plans' step ids. Each attachment has a new core, which numbers
            its steps from 1. But the ids that a worker gets within an epoch must always increase.

    Raises:
        StaleEpochError: The worker belongs to a newer scheduler.
        WorkerUnloadedError: The worker has no model, but now belongs to this scheduler.
        UnavailableError: The worker cannot be reached, is not ready, or sends invalid data.
    """
    channel = open_channel(config.target, config.max_message_mb, config.tls)
    try:
        async with _send_heartbeats(channel, config.epoch):
            info, former_epoch = await _claim(channel, config)
            holdings = await _read_holdings(channel, config, info)
    except BaseException:
        await channel.close(None)
        raise
    return WorkerLink(config, channel, info, holdings, wake, step_id_base, former_epoch)


@contextlib.asynccontextmanager
async def _send_heartbeats(channel: grpc.aio.Channel, epoch: int) -> AsyncIterator[None]:
    """Send heartbeats to the worker while the `with` block runs.

    The calls in the block may take long, because the worker first finishes the steps that it has.
    """

    async def send_heartbeats() -> None:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.DescribeDevice(worker_pb2.DescribeDeviceRequest(epoch=epoch))
            await asyncio.sleep(BEAT_S)

    heartbeats = asyncio.create_task(send_heartbeats())
    try:
        yield
    finally:
        heartbeats.cancel()
        await asyncio.wait((heartbeats,))


async def _claim(channel: grpc.aio.Channel, config: WorkerClientConfig) -> tuple[WorkerInfo, int]:
    """Claim the worker; return its description, and the epoch of its former scheduler.

    The former scheduler may be this one.
    """
    try:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]
        response = await stub.Attach(
            worker_pb2.AttachRequest(epoch=config.epoch, scheduler_id=config.scheduler_id),
            timeout=_ATTACH_TIMEOUT_S,
        )
        if response.is_unloaded:
            raise WorkerUnloadedError("its model is unloaded")
        return worker_info_from_proto(response.worker), response.former_epoch
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            raise StaleEpochError(error.details() or "the worker has a newer scheduler") from error
        raise unavailable(error) from error
    except InvalidArgumentError as error:
        raise UnavailableError(f"its description is invalid: {error}") from error


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
        raise UnavailableError(f"its report of holdings is invalid: {error}") from error
    return holdings
