"""`grpc.health.v1.Health` over a `Health`.

The servicer that comes with gRPC keeps a status of its own, and forgets all watchers of a service
when the first of them leaves; this one asks `Health` each time.
"""

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contract.errors import NotFoundError
from rpc.health.state import Health

HEALTH_SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_RECHECK_S = 1.0
"""How soon a watcher learns of a failing liveness check, which nobody announces."""

_Status = health_pb2.HealthCheckResponse.ServingStatus


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers for "" and for each service: they are ready together."""

    def __init__(self, health: Health, service_names: Collection[str]) -> None:
        self._health = health
        self._known = frozenset(("", HEALTH_SERVICE_NAME, *service_names))
        self._closed = False
        self._watchers: set[asyncio.Event] = set()
        self._loop = asyncio.get_running_loop()
        health.on_change(self._wake_from_any_thread)

    async def Check(  # noqa: N802 - the proto's name
        self, request: Any, _context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> Any:
        """SERVING if the process is ready; NOT_FOUND for a service it does not have."""
        if request.service not in self._known:
            raise NotFoundError(f"service {request.service!r} is not one of {sorted(self._known)}")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(  # noqa: N802 - the proto's name
        self, request: Any, _context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[Any]:
        """The status now and each other status after it, until the server stops."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        last: int | None = None
        try:
            while True:
                changed.clear()
                status = self._status(request.service)
                if status != last:
                    yield health_pb2.HealthCheckResponse(status=status)
                    last = status
                if self._closed:
                    return
                try:
                    async with asyncio.timeout(_RECHECK_S):
                        await changed.wait()
                except TimeoutError:
                    continue
        finally:
            self._watchers.discard(changed)

    def close(self) -> None:
        """End all watches: they would hold up the server's stop."""
        self._closed = True
        self._wake()

    def _wake_from_any_thread(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for watcher in self._watchers:
            watcher.set()

    def _status(self, service: str) -> int:
        if service not in self._known:
            return int(_Status.Value("SERVICE_UNKNOWN"))
        return int(_Status.Value("SERVING" if self._health.ready else "NOT_SERVING"))
