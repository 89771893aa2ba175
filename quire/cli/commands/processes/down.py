"""`quire down`: stops a service that `quire up` started."""

import contextlib
import os
import signal
import time
from collections.abc import Sequence

from quire.cli.settings import DownSettings
from quire.cli.target import find_service, services_at
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
        print(f"{service.title} on {service.http_address} is down; logs: {service.log_dir}")
    return 0


def _choose(settings: DownSettings) -> list[ServiceInfo]:
    if settings.all:
        return services_at(None)
    if settings.http_port is None and not services_at(None):
        print("no service of yours is up on this machine")
        return []
    return [find_service(settings.http_port)]
