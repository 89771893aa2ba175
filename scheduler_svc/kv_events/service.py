"""The gRPC service of KV events."""

import grpc.aio

from quire.v1 import kv_pb2, kv_pb2_grpc
from rpc.grpc_server import Service, service_of
from scheduler_svc.kv_events.feed import KvEvents


class KvEventServicer(kv_pb2_grpc.KvEventServiceServicer):
    """Answers the calls of `quire.v1.KvEventService`."""

    def __init__(self, events: KvEvents) -> None:
        self._events = events

    async def WatchKv(  # noqa: N802
        self,
        request: kv_pb2.WatchKvRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> None:
        """Stream snapshots and changes of the prefix caches, as fast as flow control allows."""
        with self._events.reader(request.worker) as reader:
            async for message in reader.messages():
                await context.write(message)


def kv_event_service(events: KvEvents) -> Service:
    """Return `KvEventService` in the form that `rpc.server.serve` takes."""
    return service_of(kv_pb2, kv_pb2_grpc, "KvEventService", KvEventServicer(events))
