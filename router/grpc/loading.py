"""The gRPC face of what operators do with whole models: `quire.v1.LoadingService`."""

from contextlib import aclosing

from quire.v1 import loading_pb2, loading_pb2_grpc
from router.grpc.call import CallContext
from router.operations.loading import Loading
from router.operations.loading_wire import progress_to_proto, unloaded_to_proto
from rpc.grpc_server import Service, service_of
from rpc.worker_fields import refuse_epoch


class LoadingServicer(loading_pb2_grpc.LoadingServiceServicer):
    """Answers calls; what is raised becomes status in the server's interceptor."""

    def __init__(self, loading: Loading) -> None:
        self._loading = loading

    async def Unload(  # noqa: N802
        self, request: loading_pb2.UnloadRequest, context: CallContext
    ) -> loading_pb2.UnloadResponse:
        """Has all schedulers have workers give their devices back."""
        refuse_epoch(request.epoch)
        unloaded = await self._loading.unload(request.worker, context.peer())
        return loading_pb2.UnloadResponse(workers=map(unloaded_to_proto, unloaded))

    async def Load(  # noqa: N802
        self, request: loading_pb2.LoadRequest, context: CallContext
    ) -> None:
        """Has all schedulers have workers take these again, and tells how far that is."""
        refuse_epoch(request.epoch)
        told = self._loading.load(request.worker, request.directory, context.peer())
        async with aclosing(told):
            async for each in told:
                await context.write(progress_to_proto(each))


def loading_service(loading: Loading) -> Service:
    """Make the entry for `rpc.server.serve`."""
    return service_of(loading_pb2, loading_pb2_grpc, "LoadingService", LoadingServicer(loading))
