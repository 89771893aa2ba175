"""Moves KV between two workers: sends host blocks, and fills host blocks from another worker.

The scheduler names the blocks, and ensures that nothing else reads or writes them at the same time.
Contents travel in the host's encoding, in pieces, so that steps run in between.
"""

from collections.abc import AsyncIterator, Callable
from typing import Final, Protocol
from zlib import crc32

import grpc
import grpc.aio

from contract.arrays import Int32Array
from contract.codec.packing import pack_int32
from contract.errors import UnavailableError
from quire.v1 import worker_pb2, worker_pb2_grpc
from rpc.peers.channel import open_channel
from rpc.security.tls import ClientTls

_PIECE_BYTES: Final = 4 * 1024**2
"""Bytes of one message, unless one block is larger: copying it delays a step by about 1 ms."""
_PULL_TIMEOUT_S: Final = 120.0
"""A source that takes longer counts as hung. The scheduler waits for the target without limit."""


class HostBlocks(Protocol):
    """A worker's host blocks, [0, num_host_blocks). Calls take effect between two steps."""

    async def read_host_blocks(self, block_ids: Int32Array) -> bytes:
        """The contents of int32[N] blocks, concatenated.

        Raises:
            UnavailableError: A block has changed since it was written.
            UnimplementedError: The worker has no host blocks.
        """

    async def write_host_blocks(self, block_ids: Int32Array, content: bytes) -> None:
        """Fill int32[N] distinct blocks; `content` as `read_host_blocks` returns it."""


async def read_kv(
    blocks: HostBlocks, block_ids: Int32Array, block_bytes: int
) -> AsyncIterator[worker_pb2.ReadKvResponse]:
    """Yield the contents of int32[N] blocks in pieces, in their order.

    Raises:
        QuireError: As `read_host_blocks`.
    """
    num_blocks = max(1, _PIECE_BYTES // block_bytes)
    for first in range(0, len(block_ids), num_blocks):
        content = await blocks.read_host_blocks(block_ids[first : first + num_blocks])
        yield worker_pb2.ReadKvResponse(content=content, crc32=crc32(content))


async def pull_kv(
    blocks: HostBlocks,
    source_target: str,
    request: worker_pb2.ReadKvRequest,
    block_ids: Int32Array,
    block_bytes: int,
    check: Callable[[], None],
    tls: ClientTls | None = None,
) -> None:
    """Fill int32[N] blocks with the result of `request` at the worker at `source_target`.

    Args:
        blocks: This worker's host blocks.
        source_target: A gRPC target.
        request: What to read there.
        block_ids: Distinct target blocks.
        block_bytes: Bytes of a block in the host.
        check: Called before each write; raises if the blocks are no longer the caller's.
        tls: For the call to that worker; None: plaintext.

    Raises:
        UnavailableError: The source failed, or sent too little, too much or damaged content. Some
            blocks may have been written.
    """
    num_done = 0
    async with open_channel(source_target, tls=tls) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            async for piece in stub.ReadKv(request, timeout=_PULL_TIMEOUT_S):
                if piece is None:  # gRPC could not parse the message
                    raise UnavailableError(f"{source_target} sent an invalid message")
                num_blocks = len(piece.content) // block_bytes
                max_bytes = (len(block_ids) - num_done) * block_bytes
                _check(piece, num_blocks * block_bytes, max_bytes)
                part = block_ids[num_done : num_done + num_blocks]
                check()
                await blocks.write_host_blocks(part, piece.content)
                num_done += num_blocks
        except grpc.aio.AioRpcError as error:
            code, details = error.code().name, error.details()
            raise UnavailableError(f"cannot read from {source_target}: {code}: {details}") from None
    if num_done != len(block_ids):
        raise UnavailableError(f"{source_target} sent {num_done} of {len(block_ids)} blocks")


def _check(piece: worker_pb2.ReadKvResponse, num_bytes: int, max_bytes: int) -> None:
    if len(piece.content) != num_bytes or num_bytes > max_bytes:
        raise UnavailableError(
            f"a piece has {len(piece.content)} bytes; it must be whole blocks, {max_bytes} at most"
        )
    if crc32(piece.content) != piece.crc32:
        raise UnavailableError("a piece was damaged on the way")


def read_request(
    epoch: int, instance_id: int, block_ids: Int32Array, kv_format: str
) -> worker_pb2.ReadKvRequest:
    """A request to worker `instance_id` for blocks in `kv_format`."""
    return worker_pb2.ReadKvRequest(
        epoch=epoch,
        host_block_ids=pack_int32(block_ids),
        kv_format=kv_format,
        instance_id=instance_id,
    )
