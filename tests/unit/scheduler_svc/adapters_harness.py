"""A scheduler whose workers have LoRA adapters, and a router that makes operators' calls."""

import contextlib

import grpc
import pytest
from scheduler_fake_adapters import adapter
from scheduler_fake_worker import FakeWorker
from scheduler_harness import FakeRouter, running_scheduler

from quire.v1 import adapters_pb2, adapters_pb2_grpc

A, B = "/adapters/a", "/adapters/b"
SQL = adapter("sql", A)


class Router(FakeRouter):
    """A fake router that also makes operators' calls."""

    def __init__(self, target):
        super().__init__(target)
        self.adapters = adapters_pb2_grpc.AdapterServiceStub(self.channel)

    async def load_adapter(self, name, directory):
        request = adapters_pb2.LoadAdapterRequest(name=name, directory=directory)
        loaded = await self.adapters.LoadAdapter(request)
        await self.read_until(lambda: name in self.sent_adapters)
        return loaded

    async def unload_adapter(self, name):
        await self.adapters.UnloadAdapter(adapters_pb2.UnloadAdapterRequest(name=name))

    async def listed(self):
        answer = await self.adapters.ListAdapters(adapters_pb2.ListAdaptersRequest())
        return [(each.adapter.name, each.adapter.directory) for each in answer.adapters]

    @property
    def sent_adapters(self):
        """The adapter names that the scheduler sent last."""
        for message in reversed(self.messages):
            if message.step.HasField("adapters"):
                return [each.name for each in message.step.adapters.adapters]
        return [each.name for each in self.welcome.model.adapters]


@contextlib.asynccontextmanager
async def service(folder, num_workers, before=lambda _: None):
    """A scheduler with `num_workers` attached, and a router; `before` is first called with them."""
    workers = [FakeWorker(f"unix:{folder}/w{i}") for i in range(num_workers)]
    before(workers)
    for worker in workers:
        await worker.start()
    async with running_scheduler(folder, [worker.target for worker in workers]) as scheduler:
        router = await Router(scheduler.target).connect()
        await router.wait_for_load(lambda load: load.num_workers == num_workers)
        yield scheduler, router, *workers
        await router.disconnect()
    for worker in workers:
        await worker.die()


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code().name, caught.value.details()
