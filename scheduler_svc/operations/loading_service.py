"""The scheduler's `LoadingService`: what an operator, or a router, has its workers do."""

import contextlib

import grpc.aio

from quire.v1 import loading_pb2, loading_pb2_grpc
from rpc.grpc_server import Service, service_of
from rpc.worker_fields import refuse_epoch
from scheduler_svc.operations.loading import Loading


class LoadingServicer(loading_pb2_grpc.LoadingServiceServicer):
    """Answers the calls of `quire.v1.LoadingService`."""

    def __init__(self, loading: Loading) -> None:
        self._loading = loading

    async def Unload(  # noqa: N802
        self,
        request: loading_pb2.UnloadRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]  # noqa: ARG002
    ) -> loading_pb2.UnloadResponse:
        """Have workers give their devices back."""
        refuse_epoch(request.epoch)
        unloaded = await self._loading.unload(request.worker)
        return loading_pb2.UnloadResponse(
            workers=[
                loading_pb2.UnloadedWorker(worker=each.worker, was_unloaded=each.was_unloaded)
                for each in unloaded
            ]
        )

    async def Load(  # noqa: N802
        self,
        request: loading_pb2.LoadRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> None:
        """Have them take these again, and tell how far that is."""
        refuse_epoch(request.epoch)
        told = self._loading.load(request.worker, request.directory)
        async with contextlib.aclosing(told):
            async for each in told:
                await context.write(
                    loading_pb2.LoadResponse(
                        worker=each.worker,
                        status=each.status,
                        progress=each.progress,
                        is_done=each.is_done,
                        was_loaded=each.was_loaded,
                    )
                )


def loading_service(loading: Loading) -> Service:
    """Make the entry for `rpc.server.serve`."""
    return service_of(loading_pb2, loading_pb2_grpc, "LoadingService", LoadingServicer(loading))
