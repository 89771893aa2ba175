"""`quire defragment`: has each worker's held blocks moved together."""

import contextlib
from collections.abc import Sequence
from typing import Final

import grpc

from quire.cli.command_error import CommandError
from quire.cli.settings import DefragmentSettings
from quire.cli.up.service_dir import ServiceDirError, running_services
from quire.v1 import scheduler_pb2
from quire.v1.scheduler_pb2_grpc import SchedulerServiceStub
from rpc.peers.channel import open_blocking_channel
from rpc.security.tls import explain
from rpc.settings import parse_settings

_DEFAULT_TARGET: Final = "127.0.0.1:50052"
_TIMEOUT_S: Final = 60.0


def main(argv: Sequence[str]) -> int:
    """Run `quire defragment`; give the exit code."""
    settings = parse_settings(DefragmentSettings, "quire defragment", argv)
    target = settings.scheduler or _find_scheduler()
    with open_blocking_channel(target, tls=settings.client_tls) as channel:
        stub = SchedulerServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            answer = stub.Defragment(scheduler_pb2.DefragmentRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            # A private class, which has the methods of a call.
            raise CommandError(f"scheduler {target}: {explain(error.details() or '')}") from None
    for worker in answer.workers:
        print(describe(worker))
    return 0


def describe(worker: scheduler_pb2.WorkerDefragmentation) -> str:
    """Say in a line what was done at a worker."""
    return (
        f"{worker.worker}: {worker.num_moved_blocks} blocks moved, "
        f"fragmentation {worker.rate_before:.1%} before, {worker.rate_after:.1%} after"
    )


def _find_scheduler() -> str:
    # What a stranger put there is no reason not to try the default.
    with contextlib.suppress(ServiceDirError):
        services = list(running_services())
        if len(services) == 1 and services[0].scheduler_target:
            return services[0].scheduler_target
    return _DEFAULT_TARGET
