"""`quire resize`: resizes a worker's KV pool, and shows the progress."""

from collections.abc import Sequence
from typing import Final

from quire.cli.settings import ResizeSettings
from quire.cli.target import scheduler_channel
from quire.v1 import scheduler_pb2
from quire.v1.scheduler_pb2_grpc import SchedulerServiceStub
from rpc.settings import parse_settings

_GIB: Final = 1024**3


def main(argv: Sequence[str]) -> int:
    settings = parse_settings(ResizeSettings, "quire resize", argv)
    last_line = ""
    with scheduler_channel(settings) as channel:
        stub = SchedulerServiceStub(channel)  # type: ignore[no-untyped-call]
        for answer in stub.ResizeKv(_request(settings)):
            line = describe(answer)
            if line != last_line:
                print(line, flush=True)
            last_line = line
    return 0


def describe(answer: scheduler_pb2.ResizeKvResponse) -> str:
    """Describe the progress in one line."""
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


def _request(settings: ResizeSettings) -> scheduler_pb2.ResizeKvRequest:
    request = scheduler_pb2.ResizeKvRequest(worker=settings.worker)
    if settings.blocks is not None:
        request.num_blocks = settings.blocks
    elif settings.gib is not None:
        request.num_bytes = int(settings.gib * _GIB)
    return request
