"""`quire migrate`: moves a live request with its KV to another worker."""

from collections.abc import Sequence
from typing import cast

import grpc

from quire.cli.settings import MigrateSettings
from quire.cli.target import connection_errors, find_scheduler
from quire.v1 import scheduler_pb2
from quire.v1.scheduler_pb2_grpc import SchedulerServiceStub
from rpc.channel import open_blocking_channel
from rpc.settings import parse_settings
from rpc.status import status_to_error


def main(argv: Sequence[str]) -> int:
    """Run `quire migrate`; give the exit code."""
    settings = parse_settings(MigrateSettings, "quire migrate", argv)
    target = settings.scheduler or find_scheduler()
    with connection_errors(target):
        moved = _migrate(target, settings)
    if moved.was_there:
        print(f"{settings.request_id} is at {settings.to} already")
    elif not moved.num_sequences:
        print(f"{settings.request_id} ended on the way from {moved.from_worker}")
    else:
        print(
            f"{settings.request_id} has moved from {moved.from_worker} to {settings.to}: "
            f"{moved.num_sequences} sequence{'s' * (moved.num_sequences != 1)}, "
            f"{moved.num_blocks} KV blocks"
        )
    return 0


def _migrate(target: str, settings: MigrateSettings) -> scheduler_pb2.MigrateResponse:
    request = scheduler_pb2.MigrateRequest(request_id=settings.request_id, worker=settings.to)
    with open_blocking_channel(target, tls=settings.client_tls) as channel:
        stub = SchedulerServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            response: scheduler_pb2.MigrateResponse = stub.Migrate(request)
        except grpc.RpcError as error:
            raise status_to_error(cast("grpc.aio.AioRpcError", error)) from None
    return response
