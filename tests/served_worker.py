"""Serves a worker's gRPC service on a real socket, and reads how its streams end."""

import contextlib

import grpc
import grpc.aio

from quire.v1 import worker_pb2_grpc
from rpc.peers.channel import open_channel
from rpc.status import ErrorInterceptor
from rpc.transport import DEFAULT_MAX_MESSAGE_MB, channel_options


@contextlib.asynccontextmanager
async def served(service, path):
    """Yield a stub of a `WorkerService` that listens on the Unix socket at `path`."""
    server = grpc.aio.server(
        interceptors=[ErrorInterceptor()], options=channel_options(DEFAULT_MAX_MESSAGE_MB)
    )
    service.service().add(server)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    try:
        async with open_channel(f"unix:{path}") as channel:
            yield worker_pb2_grpc.WorkerServiceStub(channel)
    finally:
        await server.stop(0)


async def failure(call):
    """Wait for the end of a stream; return its code and message."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code(), await call.details()
