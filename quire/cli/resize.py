"""`quire resize`: has a worker's KV pool grow or shrink, and says how far it is."""

from collections.abc import Iterator, Sequence
from typing import Final, cast

import grpc

from quire.cli.settings import ResizeSettings
from quire.cli.target import connection_errors, find_scheduler
from quire.v1 import scheduler_pb2
from quire.v1.scheduler_pb2_grpc import SchedulerServiceStub
from rpc.channel import open_blocking_channel
from rpc.settings import parse_settings
from rpc.status import status_to_error

_GIB: Final = 1024**3


def main(argv: Sequence[str]) -> int:
    """Run `quire resize`; give the exit code."""
    settings = parse_settings(ResizeSettings, "quire resize", argv)
    target = settings.scheduler or find_scheduler()
    last_line = ""
    with connection_errors(target):
        for answer in _resize(target, settings):
            line = describe(answer)
            if line != last_line:
                print(line, flush=True)
            last_line = line
    return 0


def describe(answer: scheduler_pb2.ResizeKvResponse) -> str:
    """Say in a line how far it is."""
    before, after = (
        _size(count, answer.block_bytes) for count in (answer.num_blocks_before, answer.num_blocks)
    )
    if answer.is_done:
        return f"{after}; before {before}"
    if answer.num_leaving_blocks:
        return f"from {before} to {after}: {answer.num_leaving_blocks} blocks are still held"
    return f"from {before} to {after}"


def _size(num_blocks: int, block_bytes: int) -> str:
    if not block_bytes:
        return f"{num_blocks:,} blocks"
    return f"{num_blocks:,} blocks ({num_blocks * block_bytes / _GIB:.3f} GiB)"


def _resize(target: str, settings: ResizeSettings) -> Iterator[scheduler_pb2.ResizeKvResponse]:
    request = scheduler_pb2.ResizeKvRequest(worker=settings.worker)
    if settings.blocks is not None:
        request.num_blocks = settings.blocks
    elif settings.gib is not None:
        request.num_bytes = int(settings.gib * _GIB)
    with open_blocking_channel(target, tls=settings.client_tls) as channel:
        stub = SchedulerServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            yield from stub.ResizeKv(request)
        except grpc.RpcError as error:
            raise status_to_error(cast("grpc.aio.AioRpcError", error)) from None
