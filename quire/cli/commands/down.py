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
    settings = parse_settings(DownSettings, "quire down", argv)
    chosen = _choose(settings)
    for service in chosen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(service.pid, signal.SIGTERM)
    # If Ctrl-C ends this wait, the supervisors still end within their drain time.
    pids = {service.pid for service in chosen}
    while pids & {service.pid for service in running_services()}:
        time.sleep(_POLL_S)
    for service in chosen:
        print(f"{service.model_name} on {service.http_address} is down.")
    return 0


def _choose(settings: DownSettings) -> list[ServiceInfo]:
    services = [each for each in running_services() if each.is_at(settings.http_port)]
    if settings.http_port is not None and not services:
        raise CommandError(f"--http-port: {settings.http_port}: no service of yours has this port")
    if len(services) > 1 and not settings.all:
        addresses = ", ".join(sorted(service.http_address for service in services))
        raise CommandError(f"several services are up ({addresses}); set --http-port or --all")
    if not services:
        print("no service of yours is up on this machine")
    return services
