"""Calls to a scheduler outside the router's stream, and the sum of several schedulers' loads."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final

import grpc.aio

from quire.v1 import (
    adapters_pb2,
    adapters_pb2_grpc,
    kv_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from quire.v1.common_pb2 import ActivityQuery, Load, WorkerActivity
from quire.v1.kv_pb2 import KvQuery, WatchKvRequest, WatchKvResponse, WorkerKv
from rpc.status import calling
from rpc.tasks import responses

_TIMEOUT_S: Final = 5.0

_NOT_ADDED: Final = ("block_size", "fragmentation", "host_fragmentation")
"""Fields of `Load` for which `sum_loads` takes the maximum."""


class SchedulerCalls:
    """Calls to one scheduler through one channel; the scheduler's errors become `QuireError`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)  # type: ignore[no-untyped-call]
        self._kv = kv_pb2_grpc.KvEventServiceStub(channel)  # type: ignore[no-untyped-call]
        self._adapters = adapters_pb2_grpc.AdapterServiceStub(channel)  # type: ignore[no-untyped-call]

    async def load(self) -> Load:
        request = scheduler_pb2.GetSchedulerLoadRequest()
        load: Load = (await _call(self._stub.GetSchedulerLoad, request)).load
        return load

    async def describe_kv(self, query: KvQuery) -> Sequence[WorkerKv]:
        """Return which sequences hold which KV blocks."""
        request = scheduler_pb2.DescribeSchedulerKvRequest(query=query)
        workers: Sequence[WorkerKv] = (await _call(self._stub.DescribeSchedulerKv, request)).workers
        return workers

    def watch_kv(self, worker: str) -> AsyncGenerator[WatchKvResponse]:
        """Yield the events of the workers' prefix caches, until the generator is closed."""
        return responses(self._kv.WatchKv(WatchKvRequest(worker=worker)))

    async def describe_activity(self, query: ActivityQuery) -> Sequence[WorkerActivity]:
        """Return the activity of the workers."""
        request = scheduler_pb2.DescribeSchedulerActivityRequest(query=query)
        response = await _call(self._stub.DescribeSchedulerActivity, request)
        workers: Sequence[WorkerActivity] = response.workers
        return workers

    async def load_adapter(self, name: str, directory: str) -> adapters_pb2.LoadAdapterResponse:
        """Load a LoRA adapter at all workers, which may take a long time."""
        request = adapters_pb2.LoadAdapterRequest(name=name, directory=directory)
        response: adapters_pb2.LoadAdapterResponse = await _call(
            self._adapters.LoadAdapter, request, timeout_s=None
        )
        return response

    async def unload_adapter(self, name: str, digest: bytes) -> None:
        """Unload an adapter once no request uses it; an empty `digest` matches any adapter."""
        request = adapters_pb2.UnloadAdapterRequest(name=name, digest=digest)
        await _call(self._adapters.UnloadAdapter, request, timeout_s=None)

    async def list_adapters(self) -> Sequence[adapters_pb2.LoadedAdapter]:
        response = await _call(self._adapters.ListAdapters, adapters_pb2.ListAdaptersRequest())
        adapters: Sequence[adapters_pb2.LoadedAdapter] = response.adapters
        return adapters


async def _call(method: Any, request: Any, timeout_s: float | None = _TIMEOUT_S) -> Any:
    with calling():
        return await method(request, timeout=timeout_s)


def sum_loads(loads: Sequence[Load]) -> Load:
    """Sum the loads of one or more schedulers."""
    total = Load()
    for field in Load.DESCRIPTOR.fields:
        values = [getattr(load, field.name) for load in loads]
        setattr(total, field.name, max(values) if field.name in _NOT_ADDED else sum(values))
    return total
