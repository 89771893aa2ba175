"""`Http2Server`, our own gRPC server: ports, services, start and stop."""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio

from rpc.http2.connection import Connection
from rpc.http2.headers import Metadata
from rpc.http2.limits import ConnectionLimits
from rpc.http2.ports import ListeningPath, listen_at
from rpc.http2.turns import ParsingTurns

_HANDSHAKE_S: Final = 10.0
_UNIX: Final = "unix:"


_Find: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class _CallDetails(grpc.HandlerCallDetails):
    """What interceptors see of a call before its handler runs."""

    def __init__(self, method: str, metadata: Metadata) -> None:
        self.method = method
        self.invocation_metadata = metadata


class Http2Server:
    """Replaces `grpc.aio.Server`; takes the same servicers and interceptors.

    Handlers are coroutine functions or asynchronous generator functions. Responses are not
    compressed.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        interceptors: Sequence["grpc.aio.ServerInterceptor[Any, Any]"] = (),
        *,
        shares_port: bool = False,
    ) -> None:
        """With `shares_port`, other processes may listen on the same port."""
        self.limits = limits
        self.connections: set[Connection] = set()
        self.is_stopping = False
        self.turns = ParsingTurns()
        self._shares_port = shares_port
        self._method_to_handler: dict[str, Any] = {}
        self._generic: list[grpc.GenericRpcHandler[Any, Any]] = []
        self._sockets: list[tuple[socket.socket, ssl.SSLContext | None]] = []
        """The bound sockets; empty after `start`."""
        self._listeners: list[asyncio.Server] = []
        self._paths: list[ListeningPath] = []
        self._find: _Find = self._look_up
        for interceptor in reversed(interceptors):
            self._find = partial(interceptor.intercept_service, self._find)

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Serve the calls for which one of `handlers` finds a method handler."""
        self._generic += handlers

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Serve the methods of `service`; `handlers` maps method names to handlers."""
        for method, handler in handlers.items():
            self._method_to_handler[f"/{service}/{method}"] = handler

    def add_insecure_port(self, address: str) -> int:
        """Bind "host:port" or "unix:/path"; return the port, or 1 for a path.

        Raises:
            OSError: The address is not available.
        """
        return self.add_secure_port(address, None)

    def add_secure_port(self, address: str, context: ssl.SSLContext | None) -> int:
        """Bind an address as `add_insecure_port` does; with a `context`, the port uses TLS.

        Raises:
            OSError: The address is not available.
        """
        if address.startswith(_UNIX):
            path = ListeningPath(Path(address.removeprefix(_UNIX)))
            self._paths.append(path)
            self._sockets.append((path.socket, context))
            return 1
        sockets = listen_at(address, shares_port=self._shares_port)
        self._sockets += ((each, context) for each in sockets)
        port: int = sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        """Accept connections."""
        loop = asyncio.get_running_loop()
        for each, context in self._sockets:
            is_path = each.family == socket.AF_UNIX
            create: Any = loop.create_unix_server if is_path else loop.create_server
            tls = {} if context is None else {"ssl_handshake_timeout": _HANDSHAKE_S}
            self._listeners.append(
                await create(lambda: Connection(self), sock=each, ssl=context, **tls)
            )
        self._sockets.clear()

    async def stop(self, grace: float | None) -> None:
        """Accept no more calls; cancel the calls that have not ended after `grace` seconds.

        Returns when all handlers have ended. May be called again with a shorter grace.
        """
        self.is_stopping = True
        for each, _ in self._sockets:  # there are some only if `start` was never called
            each.close()
        self._sockets.clear()
        for listener in self._listeners:
            listener.close()
        for path in self._paths:
            path.remove()
        for connection in list(self.connections):
            connection.leave()
        if tasks := self._tasks():
            await asyncio.wait(tasks, timeout=grace or 0)
        for connection in list(self.connections):
            connection.cut()
        while tasks := self._tasks():
            await asyncio.wait(tasks)
        for connection in list(self.connections):
            connection.close()
        if self.connections:
            await asyncio.wait([each.closed for each in self.connections])

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [task for connection in self.connections for task in connection.tasks]

    async def find_handler(self, method: str, metadata: Metadata) -> Any:
        """Return a call's handler, wrapped by the interceptors; None: the method is unknown."""
        return await self._find(_CallDetails(method, metadata))

    async def _look_up(self, details: grpc.HandlerCallDetails) -> Any:
        handler = self._method_to_handler.get(details.method)
        for generic in () if handler is not None else self._generic:
            if (handler := generic.service(details)) is not None:
                break
        return handler
