"""The scheduler's `AdapterService`: what an operator, or a router, has all its workers do."""

import grpc.aio

from contract.codec.info import adapter_to_proto
from contract.errors import InvalidArgumentError
from quire.v1 import adapters_pb2, adapters_pb2_grpc
from rpc.grpc_server import Service, service_of
from rpc.worker_fields import refuse_epoch
from scheduler_svc.operations.adapters import Adapters


class AdapterServicer(adapters_pb2_grpc.AdapterServiceServicer):
    """Answers the calls of `quire.v1.AdapterService`."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters

    async def LoadAdapter(  # noqa: N802
        self,
        request: adapters_pb2.LoadAdapterRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]  # noqa: ARG002
    ) -> adapters_pb2.LoadAdapterResponse:
        """Have every worker load one."""
        refuse_epoch(request.epoch)
        for field in ("name", "directory"):
            if not getattr(request, field):
                raise InvalidArgumentError(field, "is empty")
        loaded = await self._adapters.load(request.name, request.directory)
        return adapters_pb2.LoadAdapterResponse(
            adapter=adapter_to_proto(loaded.adapter), was_there=loaded.was_there
        )

    async def UnloadAdapter(  # noqa: N802
        self,
        request: adapters_pb2.UnloadAdapterRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]  # noqa: ARG002
    ) -> adapters_pb2.UnloadAdapterResponse:
        """Have every worker unload one, when no request has it any more."""
        refuse_epoch(request.epoch)
        await self._adapters.unload(request.name, request.digest)
        return adapters_pb2.UnloadAdapterResponse()

    async def ListAdapters(  # noqa: N802
        self,
        request: adapters_pb2.ListAdaptersRequest,  # noqa: ARG002
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]  # noqa: ARG002
    ) -> adapters_pb2.ListAdaptersResponse:
        """Say which the workers hold."""
        return adapters_pb2.ListAdaptersResponse(
            adapters=[
                adapters_pb2.LoadedAdapter(
                    adapter=adapter_to_proto(each), is_leaving=self._adapters.is_leaving(each)
                )
                for each in self._adapters.held
            ]
        )


def adapter_service(adapters: Adapters) -> Service:
    """Make the entry for `rpc.server.serve`."""
    return service_of(adapters_pb2, adapters_pb2_grpc, "AdapterService", AdapterServicer(adapters))
