"""The gRPC API for operators: KV events, adapters, models, live requests, usage."""

from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from quire.v1 import (
    adapters_pb2,
    adapters_pb2_grpc,
    kv_pb2,
    kv_pb2_grpc,
    loading_pb2,
    loading_pb2_grpc,
    requests_pb2,
    requests_pb2_grpc,
)
from router.grpc.call import CallContext
from router.operators.adapters_and_models import Operations
from router.operators.live_requests import LiveRequests
from router.operators.usage import UsageReports
from router.request.cells import Cells
from rpc.grpc_server import Service, service_of
from rpc.security.operators import Operators
from rpc.worker_fields import refuse_epoch


class AdapterServicer(adapters_pb2_grpc.AdapterServiceServicer):
    """Answers `quire.v1.AdapterService`; an interceptor turns errors into statuses."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    async def LoadAdapter(  # noqa: N802
        self, request: adapters_pb2.LoadAdapterRequest, context: CallContext
    ) -> adapters_pb2.LoadAdapterResponse:
        refuse_epoch(request.epoch)
        return await self._operations.load_adapter(
            request.name, request.directory, context.peer(), request.model
        )

    async def UnloadAdapter(  # noqa: N802
        self, request: adapters_pb2.UnloadAdapterRequest, context: CallContext
    ) -> adapters_pb2.UnloadAdapterResponse:
        refuse_epoch(request.epoch)
        await self._operations.unload_adapter(
            request.name, context.peer(), request.digest, request.model
        )
        return adapters_pb2.UnloadAdapterResponse()

    async def ListAdapters(  # noqa: N802
        self, request: adapters_pb2.ListAdaptersRequest, context: CallContext
    ) -> adapters_pb2.ListAdaptersResponse:
        adapters = await self._operations.list_adapters(context.peer(), request.model)
        return adapters_pb2.ListAdaptersResponse(adapters=adapters)


class LoadingServicer(loading_pb2_grpc.LoadingServiceServicer):
    """Answers `quire.v1.LoadingService`; an interceptor turns errors into statuses."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    async def Unload(  # noqa: N802
        self, request: loading_pb2.UnloadRequest, context: CallContext
    ) -> loading_pb2.UnloadResponse:
        refuse_epoch(request.epoch)
        workers = await self._operations.unload_models(
            request.worker, context.peer(), request.model
        )
        return loading_pb2.UnloadResponse(workers=workers)

    async def Load(  # noqa: N802
        self, request: loading_pb2.LoadRequest, context: CallContext
    ) -> None:
        refuse_epoch(request.epoch)
        loads = self._operations.load_models(
            request.worker, request.directory, context.peer(), request.model
        )
        async with aclosing(loads):
            async for progress in loads:
                await context.write(progress)


class KvEventServicer(kv_pb2_grpc.KvEventServiceServicer):
    """Answers `quire.v1.KvEventService`; an interceptor turns errors into statuses."""

    def __init__(self, cells: Cells, operators: Operators) -> None:
        self._cells = cells
        self._operators = operators

    async def WatchKv(  # noqa: N802
        self, request: kv_pb2.WatchKvRequest, context: CallContext
    ) -> None:
        self._operators.check(context.peer(), "shows the tokens of prompts")
        async with aclosing(self._cells.watch_kv(request.worker, request.model)) as messages:
            async for message in messages:
                await context.write(message)


class RequestServicer(requests_pb2_grpc.RequestServiceServicer):
    """Answers `quire.v1.RequestService`; an interceptor turns errors into statuses."""

    def __init__(self, requests: LiveRequests, usage: UsageReports) -> None:
        self._requests = requests
        self._usage = usage

    async def ListRequests(  # noqa: N802
        self, request: requests_pb2.ListRequestsRequest, context: CallContext
    ) -> requests_pb2.ListRequestsResponse:
        found = self._requests.list(request.filter, context.peer())
        return requests_pb2.ListRequestsResponse(requests=found)

    async def CancelRequests(  # noqa: N802
        self, request: requests_pb2.CancelRequestsRequest, context: CallContext
    ) -> requests_pb2.CancelRequestsResponse:
        ended = await self._requests.cancel(request.filter, context.peer())
        return requests_pb2.CancelRequestsResponse(requests=ended)

    async def ReadUsage(  # noqa: N802
        self, request: requests_pb2.ReadUsageRequest, context: CallContext
    ) -> requests_pb2.ReadUsageResponse:
        rows = await self._usage.read(
            request.since if request.HasField("since") else None,
            request.until if request.HasField("until") else None,
            request.by,
            context.peer(),
        )
        values: list[dict[str, Any]] = [{**row.group, **asdict(row.used)} for row in rows]
        return requests_pb2.ReadUsageResponse(
            rows=[requests_pb2.UsageRow(**each) for each in values]
        )


def operator_services(
    operations: Operations,
    requests: LiveRequests,
    usage: UsageReports,
    cells: Cells,
    operators: Operators,
) -> list[Service]:
    """Make the services to pass to `rpc.server.serve`."""
    return [
        service_of(kv_pb2, kv_pb2_grpc, "KvEventService", KvEventServicer(cells, operators)),
        service_of(adapters_pb2, adapters_pb2_grpc, "AdapterService", AdapterServicer(operations)),
        service_of(loading_pb2, loading_pb2_grpc, "LoadingService", LoadingServicer(operations)),
        service_of(
            requests_pb2, requests_pb2_grpc, "RequestService", RequestServicer(requests, usage)
        ),
    ]
