"""A worker's gRPC face behind a real socket, and how a stream of steps to it ends."""

import contextlib

import grpc
import grpc.aio

from quire.v1 import worker_pb2_grpc
from rpc.peers.channel import open_channel
from rpc.status import ErrorInterceptor


@contextlib.asynccontextmanager
async def served(service, path):
    """Give a stub of a `WorkerService` that listens at `path`, a Unix socket's."""
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    service.service().add(server)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    try:
        async with open_channel(f"unix:{path}") as channel:
            yield worker_pb2_grpc.WorkerServiceStub(channel)
    finally:
        await server.stop(0)


async def failure(call):
    """The code and message that a stream ends with, once it does."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code(), await call.details()
