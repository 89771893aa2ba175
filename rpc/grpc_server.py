"""The gRPC server of every process: limits, interceptors, TLS, addresses."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeAlias

import grpc.aio
import structlog

from rpc.file_limit import max_connections
from rpc.http2.limits import ConnectionLimits
from rpc.http2.ports import free_path
from rpc.http2.server import Http2Server
from rpc.observe import telemetry
from rpc.security.client_certificates import NameInterceptor
from rpc.security.tls import http2_context, server_credentials
from rpc.settings import ProcessSettings
from rpc.status import ErrorInterceptor
from rpc.transport import server_options

Server: TypeAlias = grpc.aio.Server | Http2Server

_KIB: Final = 1024
_MIB: Final = 1024 * 1024

log = structlog.get_logger()


class CannotListenError(Exception):
    """An address is in use, or does not belong to this machine."""


@dataclass(frozen=True, slots=True)
class Service:
    """One gRPC service: its full proto name, and a function that registers its servicer."""

    name: str
    add: Callable[[Any], None]


def service_of(messages: ModuleType, stubs: ModuleType, name: str, servicer: object) -> Service:
    """Make the `Service` for a servicer.

    `name` is the service's name in the proto file; `messages` (`_pb2`) and `stubs` (`_pb2_grpc`)
    were generated from that file.
    """
    descriptor = messages.DESCRIPTOR.services_by_name[name]
    add_to_server = getattr(stubs, f"add_{name}Servicer_to_server")
    return Service(descriptor.full_name, partial(add_to_server, servicer))


def make_grpc_server(
    settings: ProcessSettings,
    services: Sequence[Service],
    interceptors: Sequence[Any] = (),
    *,
    max_received_mb: int | None = None,
    shares_port: bool = False,
    by_grpcio: bool = True,
    accepts_compressed: bool = False,
) -> Server:
    """Make a server that does not listen yet.

    `interceptors` may raise a QuireError, because the server's `ErrorInterceptor` runs around
    `interceptors` and converts errors to a status. If `max_received_mb` is given, it limits the
    size of requests instead of `settings.max_message_mb`. With `shares_port`, other processes may
    listen on the same port. `by_grpcio` chooses grpcio's server; otherwise the server is an
    `Http2Server`, which spends less time on each message. Unless `accepts_compressed`, the server
    answers a compressed request with UNIMPLEMENTED.
    """
    chain = [
        telemetry.TraceInterceptor(),
        ErrorInterceptor(),
        *_name_interceptors(settings),
        *interceptors,
    ]
    server: Server
    if by_grpcio:
        options = server_options(
            settings.max_message_mb,
            settings.max_metadata_kb,
            settings.max_concurrent_streams,
            max_received_mb=max_received_mb,
            max_connections=max_connections(),
            shares_port=shares_port,
            accepts_compressed=accepts_compressed,
        )
        server = grpc.aio.server(options=options, interceptors=chain)
    else:
        limits = ConnectionLimits(
            max_received_bytes=(max_received_mb or settings.max_message_mb) * _MIB,
            max_sent_bytes=settings.max_message_mb * _MIB,
            max_metadata_bytes=settings.max_metadata_kb * _KIB,
            max_concurrent_streams=settings.max_concurrent_streams,
            max_connections=max_connections(),
            accepts_compressed=accepts_compressed,
        )
        server = Http2Server(limits, chain, shares_port=shares_port)
    for service in services:
        service.add(server)
    return server


def _name_interceptors(settings: ProcessSettings) -> list[NameInterceptor]:
    # A Unix socket has no certificates.
    is_wanted = settings.client_names and settings.uds is None
    return [NameInterceptor(settings.client_names)] if is_wanted else []


async def start_grpc_server(server: Server, settings: ProcessSettings) -> str:
    """Listen at the address in `settings`. Returns the gRPC target with the actual port.

    A Unix socket has no TLS; its file permissions control access.

    Raises:
        CannotListenError: The address is not available.
    """
    tls = settings.server_tls
    if settings.uds is not None:
        target = _listen_at_path(server, settings.uds)
    else:
        address = join(settings.host, settings.grpc_port)
        with _naming(address):
            if tls is None:
                port = server.add_insecure_port(address)
            elif isinstance(server, Http2Server):
                port = server.add_secure_port(address, http2_context(tls))
            else:
                port = server.add_secure_port(address, server_credentials(tls))
        target = join(settings.host, port)
    if settings.operator_uds is not None:
        _listen_at_path(server, settings.operator_uds)
    await server.start()
    return target


def failure_of(server: Server) -> asyncio.Future[None]:
    """Return a future that fails if grpcio's server ends with an error; start `server` first.

    For example, a call whose path is not UTF-8 ends grpcio's server, before any interceptor sees
    the call (grpcio 1.85). The server then stops listening, but does not report it:
    `wait_for_termination` waits forever.
    """
    failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_done(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) and not failure.done():
            log.error("the gRPC server has failed", error=repr(error))
            failure.set_exception(error)

    if isinstance(server, Http2Server):
        return failure
    names = {task: getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()}
    serving = [task for task, name in names.items() if name == "AioServer._server_main_loop"]
    if not serving:
        log.warning("grpcio has changed: a failure of its server would not be noticed")
    for task in serving:
        task.add_done_callback(on_done)
    return failure


def join(host: str, port: int) -> str:
    """Return "host:port"; an IPv6 address gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen_at_path(server: Server, path: Path) -> str:
    address = f"unix:{path.absolute()}"
    with _naming(address):
        free_path(path)  # grpcio would remove a socket even if another process listens there
        server.add_insecure_port(address)
    return address


@contextlib.contextmanager
def _naming(address: str) -> Iterator[None]:
    """Convert an error of the `with` block to a CannotListenError that names the address."""
    try:
        yield
    except (RuntimeError, OSError):  # grpcio raises RuntimeError, our own server OSError
        raise CannotListenError(
            f"gRPC cannot listen on {address}: it is in use, or not an address of this machine"
        ) from None
