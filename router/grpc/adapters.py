"""The gRPC face of what operators do with LoRA adapters: `quire.v1.AdapterService`."""

from quire.v1 import adapters_pb2, adapters_pb2_grpc
from router.grpc.call import CallContext
from router.operations.adapter_wire import held_to_proto, loaded_to_proto
from router.operations.adapters import Adapters
from rpc.grpc_server import Service, service_of
from rpc.worker_fields import refuse_epoch


class AdapterServicer(adapters_pb2_grpc.AdapterServiceServicer):
    """Answers calls; what is raised becomes status in the server's interceptor."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters

    async def LoadAdapter(  # noqa: N802
        self, request: adapters_pb2.LoadAdapterRequest, context: CallContext
    ) -> adapters_pb2.LoadAdapterResponse:
        """Has all schedulers load one."""
        refuse_epoch(request.epoch)
        loaded = await self._adapters.load(request.name, request.directory, context.peer())
        return loaded_to_proto(loaded)

    async def UnloadAdapter(  # noqa: N802
        self, request: adapters_pb2.UnloadAdapterRequest, context: CallContext
    ) -> adapters_pb2.UnloadAdapterResponse:
        """Has all schedulers unload one."""
        refuse_epoch(request.epoch)
        await self._adapters.unload(request.name, context.peer(), request.digest)
        return adapters_pb2.UnloadAdapterResponse()

    async def ListAdapters(  # noqa: N802
        self, _request: adapters_pb2.ListAdaptersRequest, context: CallContext
    ) -> adapters_pb2.ListAdaptersResponse:
        """Lists those of all schedulers."""
        held = await self._adapters.held(context.peer())
        return adapters_pb2.ListAdaptersResponse(adapters=map(held_to_proto, held))


def adapter_service(adapters: Adapters) -> Service:
    """Make the entry for `rpc.server.serve`."""
    return service_of(adapters_pb2, adapters_pb2_grpc, "AdapterService", AdapterServicer(adapters))
