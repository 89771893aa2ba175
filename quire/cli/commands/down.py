"""`quire down`: stops what `quire up` started."""

import contextlib
import os
import signal
import time
from collections.abc import Sequence

from quire.cli.command_error import CommandError
from quire.cli.settings import DownSettings
from quire.cli.up.service_dir import ServiceInfo, running_services
from rpc.settings import parse_settings

_POLL_S = 0.05


def main(argv: Sequence[str]) -> int:
    """Run `quire down`; give the exit code."""
    settings = parse_settings(DownSettings, "quire down", argv)
    services = list(running_services())
    chosen = _choose(settings, services)
    for service in chosen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(service.pid, signal.SIGTERM)
    # The supervisor ends within its drain time; Ctrl-C here leaves it to that.
    pids = {service.pid for service in chosen}
    while pids & {service.pid for service in running_services()}:
        time.sleep(_POLL_S)
    for service in chosen:
        print(f"{service.model_name} on {service.http_address} is down.")
    return 0


def _choose(settings: DownSettings, services: Sequence[ServiceInfo]) -> list[ServiceInfo]:
    if settings.http_port is not None:
        ending = f":{settings.http_port}"
        chosen = [service for service in services if service.http_address.endswith(ending)]
        if not chosen:
            raise CommandError(f"--http-port: {settings.http_port}: no service of yours is there")
        return chosen
    if len(services) > 1 and not settings.all:
        addresses = ", ".join(sorted(service.http_address for service in services))
        raise CommandError(f"several services are up ({addresses}); give --http-port or --all")
    if not services:
        print("no service of yours is up on this machine")
    return list(services)
