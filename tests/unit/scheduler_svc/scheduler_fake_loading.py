"""The model of a fake worker, which its scheduler unloads and loads."""

import asyncio

import grpc

from quire.v1 import loading_pb2, loading_pb2_grpc


class FakeLoading(loading_pb2_grpc.LoadingServiceServicer):
    """A fake `LoadingService`: a model has the name of its directory."""

    def __init__(self, worker):
        self.worker = worker
        self.is_unloaded = False
        self.is_loading = False
        self.error = None  # the error of the next call
        self.was_asked = asyncio.Event()
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.unload_limit_s = None
        self.may_unload = asyncio.Event()
        self.may_unload.set()

    async def Unload(self, request, context):  # noqa: N802
        assert request.epoch == self.worker.epoch
        assert not request.worker
        self.unload_limit_s = context.time_remaining()
        self.was_asked.set()
        await self.may_unload.wait()
        if self.error is not None:
            await context.abort(*self.error)
        if self.is_loading:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "it is being loaded")
        was_unloaded, self.is_unloaded = self.is_unloaded, True
        self.worker.rows = {}
        self.worker.go()
        return loading_pb2.UnloadResponse(
            workers=[loading_pb2.UnloadedWorker(worker="w", was_unloaded=was_unloaded)]
        )

    async def Load(self, request, context):  # noqa: N802
        assert request.epoch == self.worker.epoch
        self.is_loading = True  # until the model is loaded, even if the caller leaves
        yield loading_pb2.LoadResponse(worker="w", status="loading weights", progress=0.5)
        await self.may_load.wait()
        self.is_loading = False
        if self.error is not None:
            await context.abort(*self.error)
        was_loaded, self.is_unloaded = not self.is_unloaded, False
        if request.directory:
            model = self.worker.info.model
            model.id, model.directory = request.directory[1:], request.directory
            del model.adapters[:]
        yield loading_pb2.LoadResponse(
            worker="w", status="ready", is_done=True, was_loaded=was_loaded
        )
