"""Finds the process that a command calls, and explains errors if it cannot be reached."""

import contextlib
from collections.abc import Iterator
from typing import Final

import grpc

from contract.errors import UnavailableError
from quire.cli.command_error import CommandError
from quire.cli.invocation import invocation
from quire.cli.settings import RouterClientSettings, SchedulerClientSettings
from quire.cli.up.service_dir import ServiceDirError, running_services
from quire.client import Client
from rpc.peers.channel import open_blocking_channel
from rpc.status import calling

DEFAULT_TARGET: Final = "127.0.0.1:50051"

_CONNECTED_BUT: Final = "--tls-"
"""Occurs in messages to which `rpc.security.tls.explain` has added a hint."""
_NO_CONNECTION: Final = ("failed to connect", "dns resolution failed")
"""Beginnings of gRPC's own messages; a running router that is not ready sends others."""


def find_target(target: str) -> str:
    """Return `target`; if empty, the router of the only service on this machine, or the default."""
    if target:
        return target
    with contextlib.suppress(ServiceDirError):
        services = list(running_services())
        if len(services) == 1:
            return services[0].grpc_target
    return DEFAULT_TARGET


def _find_scheduler(default: str) -> str:
    targets: list[str] = []
    try:
        targets = [service.scheduler_target for service in running_services()]
    except ServiceDirError:
        if not default:
            raise
    if len(targets) == 1 and targets[0]:
        return targets[0]
    if default:
        return default
    raise CommandError(
        f"--scheduler: is not set, and {len(targets)} services of yours run on this machine"
    )


def open_client(target: str, settings: RouterClientSettings) -> Client:
    """Make a client of a router with TLS and API key from the settings."""
    return Client(target, api_key=settings.api_key.get_secret_value(), tls=settings.client_tls)


@contextlib.contextmanager
def scheduler_channel(
    settings: SchedulerClientSettings, default: str = ""
) -> Iterator[grpc.Channel]:
    """Open a channel to `--scheduler`, else to the only service on this machine, else `default`.

    Raises:
        CommandError: There is no such scheduler, or it cannot be reached.
        QuireError: A call in the `with` block failed.
    """
    target = settings.scheduler or _find_scheduler(default)
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
