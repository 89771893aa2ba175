"""Between what `ResizeKv` asks and answers, and the sizes that a pool has and shall have."""

from contract.errors import InvalidArgumentError
from quire.v1 import scheduler_pb2
from scheduler_svc.domain import ResizeProgress, WantedBlocks, WantedBytes, WantedSize


def size_from_proto(message: scheduler_pb2.ResizeKvRequest) -> WantedSize:
    """Take the size that a pool shall have.

    Raises:
        InvalidArgumentError: There is none.
    """
    match message.WhichOneof("size"):
        case "num_blocks":
            return WantedBlocks(message.num_blocks)
        case "num_bytes":
            return WantedBytes(message.num_bytes)
        case _:
            raise InvalidArgumentError("size", "is not set; it must be num_blocks or num_bytes")


def progress_to_proto(progress: ResizeProgress, *, is_done: bool) -> scheduler_pb2.ResizeKvResponse:
    """Say how far a pool is that is being resized."""
    return scheduler_pb2.ResizeKvResponse(
        num_blocks_before=progress.num_blocks_before,
        num_blocks=progress.num_blocks,
        num_leaving_blocks=progress.num_leaving_blocks,
        is_done=is_done,
        block_bytes=progress.block_bytes,
    )
