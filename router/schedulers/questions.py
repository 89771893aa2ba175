"""What a router asks a scheduler beside the stream: how busy it is, what its workers hold."""

from collections.abc import Sequence

import grpc.aio

from quire.v1 import adapters_pb2, adapters_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from quire.v1.common_pb2 import ActivityQuery, WorkerActivity
from quire.v1.kv_pb2 import KvQuery, WorkerKv
from router.domain import HeldAdapter, Load, LoadedAdapter
from router.grpc.wire import load_from_proto
from router.operations.adapter_wire import held_from_proto, loaded_from_proto
from rpc.status import calling

_TIMEOUT_S = 5.0


class SchedulerQuestions:
    """One scheduler, asked over one channel. All raise what it refuses, and that it is lost."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        """Asks whoever `channel` leads to."""
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)  # type: ignore[no-untyped-call]
        self._adapters = adapters_pb2_grpc.AdapterServiceStub(channel)  # type: ignore[no-untyped-call]

    async def load(self) -> Load:
        """Asks how busy the scheduler is."""
        request = scheduler_pb2.GetSchedulerLoadRequest()
        with calling():
            response = await self._stub.GetSchedulerLoad(request, timeout=_TIMEOUT_S)
        return load_from_proto(response.load)

    async def describe_kv(self, query: KvQuery) -> Sequence[WorkerKv]:
        """Asks who holds which KV blocks."""
        request = scheduler_pb2.DescribeSchedulerKvRequest(query=query)
        with calling():
            response = await self._stub.DescribeSchedulerKv(request, timeout=_TIMEOUT_S)
        workers: Sequence[WorkerKv] = response.workers
        return workers

    async def describe_activity(self, query: ActivityQuery) -> Sequence[WorkerActivity]:
        """Asks what the workers are doing."""
        request = scheduler_pb2.DescribeSchedulerActivityRequest(query=query)
        with calling():
            response = await self._stub.DescribeSchedulerActivity(request, timeout=_TIMEOUT_S)
        workers: Sequence[WorkerActivity] = response.workers
        return workers

    async def load_adapter(self, name: str, directory: str) -> LoadedAdapter:
        """Has the workers load a LoRA adapter, which may take long."""
        request = adapters_pb2.LoadAdapterRequest(name=name, directory=directory)
        with calling():
            response = await self._adapters.LoadAdapter(request)
        return loaded_from_proto(response)

    async def unload_adapter(self, name: str, digest: bytes) -> None:
        """Has the workers unload one, when no request has it any more; empty: of any digest."""
        request = adapters_pb2.UnloadAdapterRequest(name=name, digest=digest)
        with calling():
            await self._adapters.UnloadAdapter(request)

    async def adapters(self) -> Sequence[HeldAdapter]:
        """Asks which the workers have."""
        request = adapters_pb2.ListAdaptersRequest()
        with calling():
            response = await self._adapters.ListAdapters(request, timeout=_TIMEOUT_S)
        return [held_from_proto(each) for each in response.adapters]
