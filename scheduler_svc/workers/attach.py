"""Claims one worker for this scheduler, and takes up what it holds."""

import asyncio

import grpc.aio

from contract.codec.info import worker_info_from_proto
from contract.codec.state import check_holdings, holdings_from_proto
from contract.errors import InvalidArgumentError, StaleEpochError, UnavailableError
from contract.info import WorkerInfo
from contract.state import Holdings
from quire.v1 import worker_pb2, worker_pb2_grpc
from rpc.peers.channel import open_channel
from scheduler_svc.workers.stream import WorkerClientConfig, WorkerLink, unavailable

_ATTACH_TIMEOUT_S = 10.0


class WorkerUnloadedError(UnavailableError):
    """The worker is there and this scheduler's, but has no model."""


async def attach(config: WorkerClientConfig, wake: asyncio.Event, step_id_base: int) -> WorkerLink:
    """Claim the worker and open its Execute stream.

    Args:
        config: The worker and our epoch.
        wake: Set whenever the link has something to tell.
        step_id_base: Added to the step ids of the plans, which start anew with each attachment; on
            the wire they must grow as long as the epoch lasts.

    Raises:
        StaleEpochError: A newer scheduler has the worker.
        WorkerUnloadedError: Its model is unloaded; it is claimed all the same.
        UnavailableError: It cannot be reached, is not ready, or describes itself wrongly.
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
