"""Which process a command talks to, and what it says if none is there."""

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
"""In gRPC's words as `rpc.security.tls.explain` completes them."""
_NO_CONNECTION: Final = ("failed to connect", "dns resolution failed")
"""How gRPC's own words begin; a router that is there, but not ready, has others."""


def find_target(target: str) -> str:
    """Give `target`, or if it is empty the one service that runs here, or the default port."""
    if target:
        return target
    # What a stranger put there is no reason not to try the default.
    with contextlib.suppress(ServiceDirError):
        services = list(running_services())
        if len(services) == 1:
            return services[0].grpc_target
    return DEFAULT_TARGET


def find_scheduler() -> str:
    """Give the scheduler of the one service that runs here.

    Raises:
        CommandError: There are several, or none.
    """
    services = [service for service in running_services() if service.scheduler_target]
    if len(services) != 1:
        raise CommandError(
            f"--scheduler: is not given, and {len(services)} services of yours run on this machine"
        )
    return services[0].scheduler_target


def open_client(target: str, settings: RouterClientSettings) -> Client:
    """Make a client of a router, with what the settings say of TLS and the API key."""
    return Client(target, api_key=settings.api_key.get_secret_value(), tls=settings.client_tls)


@contextlib.contextmanager
def scheduler_channel(settings: SchedulerClientSettings) -> Iterator[grpc.Channel]:
    """Open a channel to the scheduler that is meant; calls in the block raise what it refuses.

    Raises:
        CommandError: None is named, and there are several, or none; or it is not reached.
        QuireError: What it says.
    """
    target = settings.scheduler or find_scheduler()
    with (
        connection_errors(target),
        open_blocking_channel(target, tls=settings.client_tls) as channel,
        calling(),
    ):
        yield channel


@contextlib.contextmanager
def connection_errors(target: str) -> Iterator[None]:
    """Turn the failure to reach `target` into a CommandError that says what to do."""
    try:
        yield
    except UnavailableError as error:
        if not str(error).lower().startswith(_NO_CONNECTION):
            raise
        if _CONNECTED_BUT in str(error):
            raise CommandError(f"{target} cannot be talked to: {error}") from None
        quire = invocation()
        raise CommandError(
            f"nothing answers at {target}: `{quire} up` starts a service, `{quire} status` shows"
            " what runs here, and --target HOST:PORT names one elsewhere"
        ) from None
