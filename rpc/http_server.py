"""The HTTP server of every process: health probes, and answers to malformed requests."""

import asyncio
import json
from typing import Any

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import Counter

from rpc.file_limit import max_connections
from rpc.grpc_server import CannotListenError, join
from rpc.health import Health, probes
from rpc.security.client_certificates import certificate_middleware
from rpc.security.tls import http_context
from rpc.settings import ProcessSettings

MALFORMED = Counter("quire_http_malformed", "HTTP requests that could not be parsed.")
REFUSED_CONNECTIONS = Counter(
    "quire_http_connections_refused",
    "HTTP connections refused because too many were open (ulimit -n).",
)

log = structlog.get_logger()


def make_http_runner(
    settings: ProcessSettings, app: web.Application, health: Health, shutdown_timeout_s: float
) -> web.AppRunner:
    """Make a server for `app` and the probes. It does not listen yet."""
    app.middlewares.insert(0, probes(health))
    if settings.tls_client_ca is not None:
        app.middlewares.insert(0, certificate_middleware(settings.client_names))
    return web.AppRunner(app, handler_cancellation=True, shutdown_timeout=shutdown_timeout_s)


async def start_http_server(runner: web.AppRunner, settings: ProcessSettings) -> str:
    """Listen at the address in `settings`. Returns "host:port" with the actual port.

    Raises:
        CannotListenError: The address is not available.
    """
    await runner.setup()
    try:
        await Site(runner, settings, settings.http_port).start()
    except OSError as error:
        address = join(settings.host, settings.http_port)
        raise CannotListenError(f"HTTP cannot listen on {address}: {error.strerror}") from None
    return join(settings.host, runner.addresses[0][1])


async def start_shared_site(
    runner: web.AppRunner, settings: ProcessSettings, port: int
) -> web.BaseSite:
    """Listen on an additional port, which other processes may share.

    Raises:
        CannotListenError: Another process uses the port without sharing it.
    """
    site = Site(runner, settings, port, is_shared=True)
    try:
        await site.start()
    except OSError as error:
        raise CannotListenError(f"HTTP cannot listen on {site.name}: {error.strerror}") from None
    return site


class Site(web.BaseSite):
    """Listens on a port and handles each connection with a `_Connection`."""

    def __init__(
        self,
        runner: web.AppRunner,
        settings: ProcessSettings,
        port: int,
        *,
        is_shared: bool = False,
    ) -> None:
        super().__init__(runner)
        self._runner = runner
        self._settings = settings
        self._port = port
        self._is_shared = is_shared

    @property
    def name(self) -> str:
        """The address."""
        return join(self._settings.host, self._port)

    async def start(self) -> None:
        """Open the port and accept connections."""
        await super().start()
        loop = asyncio.get_running_loop()
        manager = self._runner.server
        assert manager is not None, "the runner has been set up"
        tls = self._settings.server_tls
        self._server = await loop.create_server(
            lambda: _Connection(
                manager,
                loop=loop,
                access_log=None,  # type: ignore[arg-type]
                auto_decompress=False,
            ),
            self._settings.host,
            self._port,
            reuse_port=self._is_shared or None,
            ssl=None if tls is None else http_context(tls),
            backlog=128,
        )


class _Connection(web.RequestHandler):
    """A client's connection.

    The connection does not decompress bodies. The code that reads a body decompresses it, and
    limits its size.
    """

    __slots__ = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        manager = self._manager
        assert manager is not None, "an open connection has a server"
        most = max_connections()
        super().connection_made(transport)
        if most is not None and len(manager.connections) > most:
            REFUSED_CONNECTIONS.inc()
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a malformed request in OpenAI's format, without logging an error."""
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        MALFORMED.inc()
        problem = " ".join((message or exc.message).split())[:_MAX_PROBLEM_CHARS]
        log.debug("malformed HTTP", remote=request.remote, problem=problem)
        response = web.Response(
            status=status,
            body=json.dumps(_error_json(f"the HTTP request is malformed: {problem}")).encode(),
            content_type="application/json",
        )
        response.force_close()
        return response


_MAX_PROBLEM_CHARS = 200


def _error_json(message: str) -> dict[str, Any]:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return {"error": error}
