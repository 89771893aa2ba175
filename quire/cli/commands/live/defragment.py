"""`quire defragment`: moves held KV blocks to the low end of each worker's pool."""

from collections.abc import Sequence
from typing import Final

from quire.cli.settings import DefragmentSettings
from quire.cli.target import scheduler_channel
from quire.v1 import scheduler_pb2
from quire.v1.scheduler_pb2_grpc import SchedulerServiceStub
from rpc.settings import parse_settings

_DEFAULT_TARGET: Final = "127.0.0.1:50052"
_TIMEOUT_S: Final = 60.0


def main(argv: Sequence[str]) -> int:
    settings = parse_settings(DefragmentSettings, "quire defragment", argv)
    with scheduler_channel(settings, _DEFAULT_TARGET) as channel:
        stub = SchedulerServiceStub(channel)  # type: ignore[no-untyped-call]
        answer = stub.Defragment(scheduler_pb2.DefragmentRequest(), timeout=_TIMEOUT_S)
    for worker in answer.workers:
        print(describe(worker))
    return 0


def describe(worker: scheduler_pb2.WorkerDefragmentation) -> str:
    """Describe a worker's result in one line."""
    return (
        f"{worker.worker}: {worker.num_moved_blocks} blocks moved, "
        f"fragmentation {worker.rate_before:.1%} before, {worker.rate_after:.1%} after"
    )
