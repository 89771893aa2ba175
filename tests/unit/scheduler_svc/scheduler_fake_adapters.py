"""The adapters of a fake worker, which its scheduler loads and unloads."""

import asyncio

import grpc

from quire.v1 import adapters_pb2, adapters_pb2_grpc, common_pb2


class FakeAdapters(adapters_pb2_grpc.AdapterServiceServicer):
    """A fake `AdapterService`: an adapter's digest is 32 times its directory's last letter."""

    def __init__(self, worker):
        self.worker = worker
        self.error = None  # the error of the next load
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.was_asked = asyncio.Event()
        self.num_loads = 0

    @property
    def names(self):
        return [each.name for each in self.worker.info.model.adapters]

    def add(self, name, directory):
        self.worker.info.model.adapters.append(adapter(name, directory))

    async def LoadAdapter(self, request, context):  # noqa: N802
        assert request.epoch == self.worker.epoch
        self.was_asked.set()
        self.num_loads += 1
        await self.may_load.wait()
        if self.error is not None:
            await context.abort(*self.error)
        wanted = adapter(request.name, request.directory)
        has = {each.name: each.digest for each in self.worker.info.model.adapters}
        if has.get(request.name, wanted.digest) != wanted.digest:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "it has other contents")
        if request.name not in has:
            self.add(request.name, request.directory)
        return adapters_pb2.LoadAdapterResponse(adapter=wanted, was_there=request.name in has)

    async def UnloadAdapter(self, request, context):  # noqa: N802
        assert request.epoch == self.worker.epoch
        gone = request.name, request.digest
        kept = [
            each for each in self.worker.info.model.adapters if (each.name, each.digest) != gone
        ]
        if len(kept) == len(self.names):
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is none")
        del self.worker.info.model.adapters[:]
        self.worker.info.model.adapters.extend(kept)
        return adapters_pb2.UnloadAdapterResponse()


def adapter(name, directory):
    return common_pb2.LoraAdapter(
        name=name, digest=directory[-1:].encode() * 32, directory=directory
    )
