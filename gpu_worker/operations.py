"""The calls that unload and load the model."""

from typing import Any

import grpc.aio

from contract.errors import InvalidArgumentError
from gpu_worker.loading.model_slot import ModelSlot
from gpu_worker.service.adapters import absolute_directory
from gpu_worker.service.api import WorkerService
from quire.v1 import loading_pb2, loading_pb2_grpc
from rpc.grpc_server import Service, service_of

_POLL_S = 0.1
"""How often the progress of loading is polled."""


class LoadingServicer(loading_pb2_grpc.LoadingServiceServicer):
    """The worker's `LoadingService`: unloads the model to free the device, and loads a model."""

    def __init__(self, worker: WorkerService, slot: ModelSlot) -> None:
        self._worker = worker
        self._slot = slot

    def service(self) -> Service:
        return service_of(loading_pb2, loading_pb2_grpc, "LoadingService", self)

    async def Unload(  # noqa: N802 - the proto's name
        self, request: loading_pb2.UnloadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> loading_pb2.UnloadResponse:
        """Unload the model."""
        del context
        name = self._worker.check_claim(request.epoch)
        _check_itself(request.worker)
        was_loaded = await self._slot.unload()
        unloaded = loading_pb2.UnloadedWorker(worker=name, was_unloaded=not was_loaded)
        return loading_pb2.UnloadResponse(workers=[unloaded])

    async def Load(  # noqa: N802 - the proto's name
        self, request: loading_pb2.LoadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Load a model, and stream the progress."""
        name = self._worker.check_claim(request.epoch)
        _check_itself(request.worker)
        directory = absolute_directory(request.directory) if request.directory else None
        load = self._slot.begin_load(directory)
        if load is None:
            await context.write(
                loading_pb2.LoadResponse(worker=name, status="ready", is_done=True, was_loaded=True)
            )
            return
        reported: loading_pb2.LoadResponse | None = None
        is_loaded = False
        while not is_loaded:
            report = loading_pb2.LoadResponse(
                worker=name, status=load.status, progress=load.progress
            )
            if report != reported:
                await context.write(report)
                reported = report
            is_loaded = await load.wait(_POLL_S)
        await context.write(loading_pb2.LoadResponse(worker=name, status="ready", is_done=True))


def _check_itself(worker: str) -> None:
    if worker:
        raise InvalidArgumentError(
            "worker", f"is {worker!r}; a worker has one model, so it must be empty"
        )
