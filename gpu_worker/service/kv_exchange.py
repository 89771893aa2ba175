"""Moves KV between two workers: sends host blocks, and fills host blocks from another worker.

The scheduler names the blocks, and ensures that nothing else reads or writes these blocks during
the transfer. The contents are sent in the encoding that they have in host memory, in pieces of
several blocks; steps run between two pieces. The contents travel in messages unless both workers
have NIXL. With NIXL the worker that fills blocks reads the contents directly from the source's
memory, and messages contain only addresses and checksums.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Final, Protocol
from zlib import crc32

import grpc
import grpc.aio
import structlog

from contract.arrays import Int32Array
from contract.codec.packing import pack_int32, unpack_int32
from contract.errors import UnavailableError
from gpu_worker import metrics
from gpu_worker.kv.nixl_engine import Bytes, NixlEngine, TransferFailedError
from quire.v1 import worker_pb2, worker_pb2_grpc
from rpc.peers.channel import open_channel
from rpc.security.tls import ClientTls

_PIECE_BYTES: Final = 4 * 1024**2
"""Limit on the bytes of blocks in a message; a block larger than this limit gets its own message.
Copying this many bytes delays a step by about 1 ms."""
_PULL_TIMEOUT_S: Final = 120.0
"""Limit on a `ReadKv` call: a source that takes longer counts as hung. The limit is needed, because
the scheduler calls `PullKv` without a deadline."""

_log = structlog.get_logger()


class HostBlocks(Protocol):
    """A worker's host blocks, numbered from 0. Calls take effect between two steps."""

    async def read_host_blocks(self, block_ids: Int32Array) -> bytes:
        """Return the contents of int32[N] blocks, concatenated.

        Raises:
            UnavailableError: A block has changed since it was written.
            UnimplementedError: The worker has no host blocks.
        """

    async def checksum_host_blocks(self, block_ids: Int32Array) -> int:
        """Return the CRC-32 of the result of `read_host_blocks`; raise the same errors."""

    async def write_host_blocks(self, block_ids: Int32Array, content: bytes | Bytes) -> None:
        """Fill int32[N] distinct blocks; `content` has the form that `read_host_blocks` returns."""


async def read_kv(
    blocks: HostBlocks,
    block_ids: Int32Array,
    block_bytes: int,
    transfer: NixlEngine | None = None,
) -> AsyncGenerator[worker_pb2.ReadKvResponse]:
    """Yield messages with the contents of int32[N] blocks, in order.

    With `transfer` the messages have addresses and checksums instead of the contents.

    Args:
        blocks: This worker's host blocks.
        block_ids: The blocks to read.
        block_bytes: Number of bytes of a host block.
        transfer: The engine with which the other worker reads the contents; None: send the contents
            in messages.

    Raises:
        QuireError: See `read_host_blocks`.
    """
    if transfer is None:
        num_blocks = max(1, _PIECE_BYTES // block_bytes)
        for first in range(0, len(block_ids), num_blocks):
            content = await blocks.read_host_blocks(block_ids[first : first + num_blocks])
            yield worker_pb2.ReadKvResponse(content=content, crc32=crc32(content))
        return
    memory: worker_pb2.KvMemory | None = worker_pb2.KvMemory(
        agent=transfer.agent_metadata, address=transfer.address
    )
    with transfer.serving():
        for first in range(0, len(block_ids), transfer.num_staged):
            part = block_ids[first : first + transfer.num_staged]
            checksum = await blocks.checksum_host_blocks(part)
            yield worker_pb2.ReadKvResponse(memory=memory, crc32=checksum, num_blocks=len(part))
            memory = None
        await asyncio.sleep(_PULL_TIMEOUT_S)  # the caller ends the call when it has read all blocks


async def pull_kv(
    blocks: HostBlocks,
    source_target: str,
    request: worker_pb2.ReadKvRequest,
    block_ids: Int32Array,
    block_bytes: int,
    check: Callable[[], None],
    tls: ClientTls | None = None,
    transfer: NixlEngine | None = None,
) -> None:
    """Send `request` to the worker at `source_target`, and fill int32[N] blocks with the result.

    If `transfer` fails, the source sends the contents in messages instead, and `transfer` avoids
    the source for some time.

    Args:
        blocks: This worker's host blocks.
        source_target: A gRPC target.
        request: A result of `read_request`, which names the source's blocks.
        block_ids: Distinct target blocks.
        block_bytes: Number of bytes of a host block.
        check: Called before each write; raises if the caller may no longer write to the blocks.
        tls: TLS settings for the call to the source; None: plaintext.
        transfer: Reads the contents from the source's memory. If `transfer` is None, or if the
            source has no NIXL, the source sends the contents in messages.

    Raises:
        UnavailableError: The source failed, or sent too little, too much or damaged content. Some
            target blocks may be overwritten.
    """
    pull = _Pull(blocks, source_target, block_ids, block_bytes, check)
    async with open_channel(source_target, tls=tls) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]
        if transfer is not None and transfer.is_usable(request.instance_id):
            request.transfer = worker_pb2.KV_TRANSFER_NIXL
            try:
                await pull.run(stub, request, transfer)
            except TransferFailedError as error:
                _log.warning(
                    "pulling KV over gRPC, because NIXL failed",
                    source=source_target,
                    reason=str(error),
                )
                transfer.avoid(request.instance_id)
                request.transfer = worker_pb2.KV_TRANSFER_UNSPECIFIED
            else:
                return
        await pull.run(stub, request)


class _Pull:
    """One pull of blocks from a worker."""

    def __init__(
        self,
        blocks: HostBlocks,
        source_target: str,
        block_ids: Int32Array,
        block_bytes: int,
        check: Callable[[], None],
    ) -> None:
        self._blocks = blocks
        self._source_target = source_target
        self._block_ids = block_ids
        self._block_bytes = block_bytes
        self._check = check

    async def run(
        self,
        stub: worker_pb2_grpc.WorkerServiceStub,
        request: worker_pb2.ReadKvRequest,
        transfer: NixlEngine | None = None,
    ) -> None:
        """Make the request, and write the received contents to the target blocks."""
        sources = unpack_int32(request.host_block_ids, "host_block_ids")
        memory = worker_pb2.KvMemory()
        num_done = 0
        try:
            call = stub.ReadKv(request, timeout=_PULL_TIMEOUT_S)
            async for piece in call:
                if piece is None:  # gRPC could not parse the message
                    raise UnavailableError(f"{self._source_target} sent an invalid message")
                if piece.HasField("memory"):
                    memory = piece.memory
                num_blocks = self._num_blocks(piece, len(sources) - num_done, transfer)
                part = slice(num_done, num_done + num_blocks)
                if transfer is None or piece.content:
                    if crc32(piece.content) != piece.crc32:
                        raise UnavailableError("a piece was damaged on the way")
                    await self._write(part, piece.content, "grpc")
                else:
                    async with transfer.read(
                        memory.agent, memory.address, sources[part], piece.crc32
                    ) as content:
                        await self._write(part, content, "nixl")
                num_done += num_blocks
                if transfer is not None and num_done == len(sources):
                    call.cancel()  # the source serves until the call ends
                    break
        except grpc.aio.AioRpcError as error:
            code, details = error.code().name, error.details()
            raise UnavailableError(
                f"cannot read from {self._source_target}: {code}: {details}"
            ) from None
        if num_done != len(self._block_ids):
            raise UnavailableError(
                f"{self._source_target} sent {num_done} of {len(self._block_ids)} blocks"
            )

    def _num_blocks(
        self, piece: worker_pb2.ReadKvResponse, max_blocks: int, transfer: NixlEngine | None
    ) -> int:
        """Return how many blocks a response has.

        Raises:
            UnavailableError: The response has no block, part of a block, or too many blocks.
        """
        num_bytes = len(piece.content)
        if transfer is not None and not num_bytes:
            max_blocks = min(max_blocks, transfer.num_staged)
            num_bytes = piece.num_blocks * self._block_bytes
        num_blocks, rest = divmod(num_bytes, self._block_bytes)
        if rest or not 0 < num_blocks <= max_blocks:
            raise UnavailableError(
                f"a piece has {num_bytes} bytes; it must be whole blocks,"
                f" {max_blocks * self._block_bytes} at most"
            )
        return num_blocks

    async def _write(self, part: slice, content: bytes | Bytes, means: str) -> None:
        self._check()
        await self._blocks.write_host_blocks(self._block_ids[part], content)
        metrics.KV_PULLED_BYTES.labels(means).inc(len(content))


def read_request(
    epoch: int, instance_id: int, block_ids: Int32Array, kv_format: str
) -> worker_pb2.ReadKvRequest:
    """Make a request to worker `instance_id` for the contents of host blocks.

    That worker refuses the request unless `kv_format` is its own format of KV in host memory.
    """
    return worker_pb2.ReadKvRequest(
        epoch=epoch,
        host_block_ids=pack_int32(block_ids),
        kv_format=kv_format,
        instance_id=instance_id,
    )
