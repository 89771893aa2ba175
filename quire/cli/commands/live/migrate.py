"""`quire migrate`: moves a live request with its KV to another worker."""

from collections.abc import Sequence

from quire.cli.settings import MigrateSettings
from quire.cli.target import scheduler_channel
from quire.v1 import scheduler_pb2
from quire.v1.scheduler_pb2_grpc import SchedulerServiceStub
from rpc.settings import parse_settings


def main(argv: Sequence[str]) -> int:
    settings = parse_settings(MigrateSettings, "quire migrate", argv)
    request = scheduler_pb2.MigrateRequest(request_id=settings.request_id, worker=settings.to)
    with scheduler_channel(settings) as channel:
        stub = SchedulerServiceStub(channel)  # type: ignore[no-untyped-call]
        moved = stub.Migrate(request)
    if moved.was_there:
        print(f"{settings.request_id} is at {settings.to} already")
    elif not moved.num_sequences:
        print(f"{settings.request_id} ended during its move from {moved.from_worker}")
    else:
        print(
            f"{settings.request_id} has moved from {moved.from_worker} to {settings.to}: "
            f"{moved.num_sequences} sequence{'s' * (moved.num_sequences != 1)}, "
            f"{moved.num_blocks} KV blocks"
        )
    return 0
