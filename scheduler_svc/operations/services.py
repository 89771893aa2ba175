"""The gRPC services `AdapterService` and `LoadingService`, for operators and routers."""

import contextlib
from collections.abc import Awaitable, Callable

import grpc.aio

from contract.codec.info import adapter_to_proto
from contract.errors import InvalidArgumentError
from quire.v1 import adapters_pb2, adapters_pb2_grpc, loading_pb2, loading_pb2_grpc
from rpc.grpc_server import Service, service_of
from rpc.worker_fields import refuse_epoch
from scheduler_svc.operations.loading import Loading
from scheduler_svc.workers.adapters import Adapters


class AdapterServicer(adapters_pb2_grpc.AdapterServiceServicer):
    """Answers the calls of `quire.v1.AdapterService`."""

    def __init__(self, adapters: Adapters, written: Callable[[], Awaitable[None]]) -> None:
        """`written` waits until all changes to the adapters are in the state file."""
        self._adapters = adapters
        self._written = written

    async def LoadAdapter(  # noqa: N802
        self,
        request: adapters_pb2.LoadAdapterRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]  # noqa: ARG002
    ) -> adapters_pb2.LoadAdapterResponse:
        """Load a LoRA adapter at every worker."""
        refuse_epoch(request.epoch)
        for field in ("name", "directory"):
            if not getattr(request, field):
                raise InvalidArgumentError(field, "is empty")
        loaded = await self._adapters.load(request.name, request.directory)
        await self._written()
        return adapters_pb2.LoadAdapterResponse(
            adapter=adapter_to_proto(loaded.adapter), was_there=loaded.was_there
        )

    async def UnloadAdapter(  # noqa: N802
        self,
        request: adapters_pb2.UnloadAdapterRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]  # noqa: ARG002
    ) -> adapters_pb2.UnloadAdapterResponse:
        """Unload a LoRA adapter at every worker as soon as no request uses it."""
        refuse_epoch(request.epoch)
        await self._adapters.unload(request.name, request.digest)
        await self._written()
        return adapters_pb2.UnloadAdapterResponse()

    async def ListAdapters(  # noqa: N802
        self,
        request: adapters_pb2.ListAdaptersRequest,  # noqa: ARG002
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]  # noqa: ARG002
    ) -> adapters_pb2.ListAdaptersResponse:
        """List the LoRA adapters that the workers hold."""
        return adapters_pb2.ListAdaptersResponse(
            adapters=[
                adapters_pb2.LoadedAdapter(
                    adapter=adapter_to_proto(each), is_leaving=self._adapters.is_leaving(each)
                )
                for each in self._adapters.held
            ]
        )


def adapter_service(adapters: Adapters, written: Callable[[], Awaitable[None]]) -> Service:
    """Return `AdapterService` in the form that `rpc.server.serve` takes."""
    servicer = AdapterServicer(adapters, written)
    return service_of(adapters_pb2, adapters_pb2_grpc, "AdapterService", servicer)


class LoadingServicer(loading_pb2_grpc.LoadingServiceServicer):
    """Answers the calls of `quire.v1.LoadingService`."""

    def __init__(self, loading: Loading) -> None:
        self._loading = loading

    async def Unload(  # noqa: N802
        self,
        request: loading_pb2.UnloadRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]  # noqa: ARG002
    ) -> loading_pb2.UnloadResponse:
        """Unload the model of one worker or of all workers."""
        refuse_epoch(request.epoch)
        unloaded = await self._loading.unload(request.worker)
        return loading_pb2.UnloadResponse(
            workers=[
                loading_pb2.UnloadedWorker(worker=worker, was_unloaded=was_unloaded)
                for worker, was_unloaded in unloaded.items()
            ]
        )

    async def Load(  # noqa: N802
        self,
        request: loading_pb2.LoadRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> None:
        """Load the model of one worker or of all workers, and stream the progress."""
        refuse_epoch(request.epoch)
        loading = self._loading.load(request.worker, request.directory)
        async with contextlib.aclosing(loading):
            async for progress in loading:
                await context.write(progress)


def loading_service(loading: Loading) -> Service:
    """Return `LoadingService` in the form that `rpc.server.serve` takes."""
    return service_of(loading_pb2, loading_pb2_grpc, "LoadingService", LoadingServicer(loading))
