"""Finds the process that a command calls, and explains why a process cannot be reached."""

import contextlib
from collections.abc import Iterator
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contract.errors import UnavailableError
from quire.cli.command_error import CommandError
from quire.cli.invocation import invocation
from quire.cli.settings import (
    RouterClientSettings,
    RouterTargetSettings,
    SchedulerClientSettings,
)
from quire.cli.up.service_dir import ServiceDirError, ServiceInfo, running_services
from quire.client import Client
from rpc.peers.channel import open_blocking_channel
from rpc.status import calling

DEFAULT_TARGET: Final = "127.0.0.1:50051"

_ANSWER_S: Final = 2.0
"""How long to wait for a scheduler's answer. There is a limit because a scheduler that hangs
accepts connections, but never answers."""
_CONNECTED_BUT: Final = "--tls-"
"""Every hint that `rpc.security.tls.explain` adds to an error contains this text. An error with a
hint means that a server was reached."""
_NO_CONNECTION: Final = ("failed to connect", "dns resolution failed")
"""Beginnings of gRPC's messages when no connection is possible."""


def services_at(http_port: int | None) -> list[ServiceInfo]:
    """Return the services of this machine, or only the one whose router has `http_port`."""
    return [service for service in running_services() if service.is_at(http_port)]


def find_service(http_port: int | None) -> ServiceInfo:
    """Return the service whose router has `http_port`; None: return the only service.

    Raises:
        CommandError: There is no such service, or there are several.
    """
    if len(found := services_at(http_port)) == 1:
        return found[0]
    if http_port is not None:
        raise CommandError(f"--http-port: {http_port}: no service of yours has this port")
    if found:
        addresses = ", ".join(sorted(service.http_address for service in found))
        raise CommandError(f"--http-port: must choose one: several services are up ({addresses})")
    raise CommandError(f"no service of yours is up on this machine; `{invocation()} up` starts one")


def find_target(settings: RouterTargetSettings) -> str:
    """Return the gRPC target of the router that the settings choose, else `DEFAULT_TARGET`."""
    if settings.target:
        return settings.target
    service = _find_service_if_any(settings.http_port)
    return DEFAULT_TARGET if service is None else service.grpc_target


def find_operator_targets(settings: RouterTargetSettings) -> tuple[str, ...]:
    """Return, for each router of the chosen service, the target for operators' calls.

    If --target is set, or no service is found, return only the target of `find_target`.
    """
    service = None if settings.target else _find_service_if_any(settings.http_port)
    if service is None or not service.operator_target:
        return (find_target(settings),)
    return service.operator_target, *service.other_operator_targets


def _find_service_if_any(http_port: int | None) -> ServiceInfo | None:
    try:
        services = services_at(None)
    except ServiceDirError:
        return None
    # In a container, QUIRE_HTTP_PORT is set for the process itself, and there is no service.
    if not services or (http_port is None and len(services) > 1):
        return None
    return find_service(http_port)


def _find_scheduler(http_port: int | None, default: str, model: str = "") -> str:
    if default:
        service = _find_service_if_any(http_port)
        return default if service is None else _serving(_scheduler_of(service, model)) or default
    try:
        service = find_service(http_port)
    except CommandError as error:
        raise CommandError(f"{error}; --scheduler HOST:PORT names a scheduler elsewhere") from None
    return _serving(_scheduler_of(service, model))


def _serving(targets: str) -> str:
    """Return that one of the comma-separated `targets` at which a scheduler serves.

    A scheduler that stands by does not listen.
    """
    first, *others = targets.split(",")
    if others and not _answers(first):
        return next(filter(_answers, others), first)
    return first


def _answers(target: str) -> bool:
    with open_blocking_channel(target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        try:
            health.Check(health_pb2.HealthCheckRequest(), timeout=_ANSWER_S)
        except grpc.RpcError:
            return False
        return True


def _scheduler_of(service: ServiceInfo, model: str) -> str:
    targets = service.scheduler_targets
    if not model and len(targets) < 2:  # noqa: PLR2004 - the only one
        return service.scheduler_target
    if model not in targets:
        raise CommandError(
            f"--served-model: {model or 'is not set'}: it must be one of {', '.join(targets)}"
        )
    return targets[model]


def open_client(target: str, settings: RouterClientSettings) -> Client:
    """Make a client for the router at `target`, with the API key and TLS files of the settings."""
    return Client(target, api_key=settings.api_key.get_secret_value(), tls=settings.client_tls)


@contextlib.contextmanager
def scheduler_channel(
    settings: SchedulerClientSettings, default: str = ""
) -> Iterator[grpc.Channel]:
    """Open a channel to --scheduler, or else to a scheduler of the service on this machine.

    `default` is the target if there is no service.

    Raises:
        CommandError: There is no such scheduler, or it cannot be reached.
        QuireError: A call in the `with` block failed.
    """
    if settings.scheduler and settings.served_model:
        raise CommandError(
            f"--served-model {settings.served_model} chooses among this machine's schedulers, and"
            f" --scheduler {settings.scheduler} names one; give one of the two"
        )
    target = settings.scheduler or _find_scheduler(
        settings.http_port, default, settings.served_model
    )
    with (
        connection_errors(target),
        open_blocking_channel(target, tls=settings.client_tls) as channel,
        calling(),
    ):
        yield channel


@contextlib.contextmanager
def connection_errors(target: str) -> Iterator[None]:
    """Turn a failure to reach `target` into a CommandError with advice."""
    try:
        yield
    except UnavailableError as error:
        if not str(error).lower().startswith(_NO_CONNECTION):
            raise
        if _CONNECTED_BUT in str(error):
            raise CommandError(f"{target} cannot be reached: {error}") from None
        quire = invocation()
        raise CommandError(
            f"nothing answers at {target}: `{quire} up` starts a service, `{quire} status` shows"
            " the services on this machine, and --target HOST:PORT names one elsewhere"
        ) from None
