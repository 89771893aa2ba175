"""What HTTP offers on every process: `/health`, `/ready`, `/metrics`."""

from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from rpc.health.state import Health


def probes(health: Health) -> Middleware:
    """Make the middleware that answers probes.

    A middleware rather than routes, and the outermost: the application's own (authentication, for
    one) must not come between a process and those who look after it.
    """

    async def answer_health() -> web.Response:
        failures = health.failures()
        if failures:
            return web.json_response({"status": "failing", "failures": failures}, status=503)
        return web.json_response({"status": "ok"})

    async def answer_ready() -> web.Response:
        body: dict[str, object] = {"status": health.status}
        if health.progress is not None:
            body["progress"] = health.progress
        failures = health.failures()
        if failures:
            body |= {"status": "failing", "failures": failures}
        return web.json_response(body, status=200 if health.ready else 503)

    async def answer_metrics() -> web.Response:
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
