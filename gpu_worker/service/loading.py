"""The worker's `LoadingService`: its scheduler has it give the device back, and take it again."""

from typing import Any

import grpc.aio

from contract.errors import InvalidArgumentError
from gpu_worker.loading.slot import ModelSlot
from gpu_worker.service.adapters import absolute_directory
from gpu_worker.service.api import WorkerService
from quire.v1 import loading_pb2, loading_pb2_grpc
from rpc.grpc_server import Service, service_of

_LOOK_S = 0.1
"""How often it is looked how far a model is."""


class LoadingServicer(loading_pb2_grpc.LoadingServiceServicer):
    """Answers the calls of `quire.v1.LoadingService`."""

    def __init__(self, worker: WorkerService, slot: ModelSlot) -> None:
        self._worker = worker
        self._slot = slot

    def service(self) -> Service:
        """What `rpc.server.serve` takes."""
        return service_of(loading_pb2, loading_pb2_grpc, "LoadingService", self)

    async def Unload(  # noqa: N802 - the proto's name
        self, request: loading_pb2.UnloadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> loading_pb2.UnloadResponse:
        """Give the device back."""
        del context
        name = self._worker.check_claim(request.epoch)
        _check_itself(request.worker)
        was_loaded = await self._slot.unload()
        unloaded = loading_pb2.UnloadedWorker(worker=name, was_unloaded=not was_loaded)
        return loading_pb2.UnloadResponse(workers=[unloaded])

    async def Load(  # noqa: N802 - the proto's name
        self, request: loading_pb2.LoadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Take it again, and tell how far that is."""
        name = self._worker.check_claim(request.epoch)
        _check_itself(request.worker)
        directory = absolute_directory(request.directory) if request.directory else None
        load = self._slot.begin_load(directory)
        if load is None:
            await context.write(
                loading_pb2.LoadResponse(worker=name, status="ready", is_done=True, was_loaded=True)
            )
            return
        told: loading_pb2.LoadResponse | None = None
        while not await load.wait(_LOOK_S):
            telling = loading_pb2.LoadResponse(
                worker=name, status=load.status, progress=load.progress
            )
            if telling != told:
                await context.write(told := telling)
        await context.write(loading_pb2.LoadResponse(worker=name, status="ready", is_done=True))


def _check_itself(worker: str) -> None:
    if worker:
        raise InvalidArgumentError(
            "worker", f"is {worker!r}; asked of a worker, which has one model, it must be empty"
        )
