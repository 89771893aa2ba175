"""Health of a process, which gRPC and HTTP probes read."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import grpc
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from contract.errors import NotFoundError

HEALTH_SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_RECHECK_S = 1.0
"""Interval at which `Watch` repeats the liveness checks, because checks do not report changes."""

_Status = health_pb2.HealthCheckResponse.ServingStatus


@dataclass(frozen=True, slots=True)
class _State:
    ready: bool
    status: str
    progress: float | None
    final: bool = False


@dataclass(slots=True)
class Health:
    """Readiness, which the process declares, and liveness, which checks determine.

    The methods may be called from any thread; callbacks run in the calling thread.
    """

    _state: _State = field(default=_State(ready=False, status="starting", progress=None))
    _checks: dict[str, Callable[[], str | None]] = field(default_factory=dict)
    _callbacks: list[Callable[[], None]] = field(default_factory=list)
    _before_scrape: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    _details: dict[str, Callable[[], object]] = field(default_factory=dict)

    def set_starting(self, status: str, progress: float | None = None) -> None:
        """Declare the current step of the start, such as "loading weights".

        `progress` is in [0, 1].
        """
        self._set(_State(ready=False, status=status, progress=progress))

    def set_ready(self, but: str | None = None) -> None:
        """Declare the process ready; `but` names a problem that does not prevent requests."""
        status = "ready" if but is None else f"ready, but {but}"
        self._set(_State(ready=True, status=status, progress=None))

    def set_not_ready(self, reason: str) -> None:
        """Declare the process not ready, for a reason such as "no worker is attached"."""
        self._set(_State(ready=False, status=reason, progress=None))

    def set_draining(self) -> None:
        """Declare the process not ready, forever; later declarations have no effect."""
        self._set(_State(ready=False, status="draining", progress=None, final=True))

    def add_liveness(self, name: str, check: Callable[[], str | None]) -> None:
        """Call `check` at each probe; `check` returns a problem or None, without waiting."""
        self._checks[name] = check

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` after each declaration."""
        self._callbacks.append(callback)

    def add_details(self, name: str, read: Callable[[], object]) -> None:
        """Show `name` in the answer of `/ready`, with the JSON value that `read` returns."""
        self._details[name] = read

    @property
    def details(self) -> dict[str, object]:
        """The details that `/ready` shows besides the status."""
        return {name: read() for name, read in self._details.items()}

    def before_scrape(self, refresh: Callable[[], Awaitable[None]]) -> None:
        """Await `refresh` before each answer of `/metrics`.

        `refresh` updates gauges whose values come from another process.
        """
        self._before_scrape.append(refresh)

    async def refresh_metrics(self) -> None:
        """Await the functions registered with `before_scrape`."""
        for refresh in self._before_scrape:
            await refresh()

    @property
    def ready(self) -> bool:
        """Whether the process is declared ready and no liveness check fails."""
        return self._state.ready and not self.failures()

    @property
    def status(self) -> str:
        """The status in words: "ready", "ready, but ...", or why the process is not ready."""
        return self._state.status

    @property
    def progress(self) -> float | None:
        """The progress of a long start, in [0, 1]; None: unknown, or the start has ended."""
        return self._state.progress

    def failures(self) -> dict[str, str]:
        """Return the problem of each failing liveness check, by the check's name."""
        found: dict[str, str] = {}
        for name, check in tuple(self._checks.items()):
            problem = check()
            if problem is not None:
                found[name] = problem
        return found

    def _set(self, state: _State) -> None:
        if self._state.final:
            return
        # This single assignment of an immutable value shows other threads no partial change.
        self._state = state
        for callback in tuple(self._callbacks):
            callback()


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers `grpc.health.v1.Health`; the process and all its services have the same status.

    The service name "" means the process. gRPC's own servicer is not used: it would store a second
    copy of the status, and it forgets all watchers of a service when the first watcher leaves.
    """

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
        """Return SERVING if the process is ready; raises NotFoundError for an unknown service."""
        if request.service not in self._known:
            raise NotFoundError(f"service {request.service!r} is not one of {sorted(self._known)}")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(  # noqa: N802 - the proto's name
        self, request: Any, _context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[Any]:
        """Yield the status now and after each change, until the server stops."""
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
        """End all calls of `Watch`, which would delay the server's stop."""
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


def probes(health: Health) -> Middleware:
    """Make the middleware that answers `/health`, `/ready` and `/metrics` in every process.

    It must run before the application's own middleware, such as authentication, which would refuse
    probes.
    """

    async def answer_health() -> web.Response:
        failures = health.failures()
        if failures:
            return web.json_response({"status": "failing", "failures": failures}, status=503)
        return web.json_response({"status": "ok"})

    async def answer_ready() -> web.Response:
        body: dict[str, object] = {"status": health.status, **health.details}
        if health.progress is not None:
            body["progress"] = health.progress
        failures = health.failures()
        if failures:
            body |= {"status": "failing", "failures": failures}
        return web.json_response(body, status=200 if health.ready else 503)

    async def answer_metrics() -> web.Response:
        await health.refresh_metrics()
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    path_to_answer: dict[str, Callable[[], Awaitable[web.Response]]] = {
        "/health": answer_health,
        "/ready": answer_ready,
        "/metrics": answer_metrics,
    }

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        answer = path_to_answer.get(request.path)
        if answer is None or request.method not in ("GET", "HEAD"):
            return await handler(request)
        return await answer()

    return middleware
