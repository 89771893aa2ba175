"""`quire restart`: restarts the processes of a service, one after another."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence

from quire.cli.command_error import CommandError
from quire.cli.readiness import wait_until_ready
from quire.cli.settings import RestartSettings
from quire.cli.target import find_service
from quire.cli.up.service_dir import ServiceInfo, ServiceProcess, running_services
from rpc.settings import parse_settings

_POLL_S = 0.05


def main(argv: Sequence[str]) -> int:
    settings = parse_settings(RestartSettings, "quire restart", argv)
    service = find_service(settings.http_port)
    for process in _chosen(service, settings.names):
        started_at = time.monotonic()
        _restart(service, process)
        print(f"{process.name} is ready again after {time.monotonic() - started_at:.1f} s")
    return 0


def _chosen(service: ServiceInfo, names: Sequence[str]) -> list[ServiceProcess]:
    """Return the chosen processes in the order in which they were started: workers first."""
    known = [process.name for process in service.processes]
    if unknown := sorted({*names} - {*known}):
        raise CommandError(
            f"{', '.join(unknown)}: no such process; it must be one of {', '.join(known)}"
        )
    return [process for process in service.processes if not names or process.name in names]


def _restart(service: ServiceInfo, process: ServiceProcess) -> None:
    """Drain and end a process; wait until the process that replaces it is ready."""
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
    while (new := _find(service, process.name).pid) in (None, process.pid):
        time.sleep(_POLL_S)

    def check() -> None:
        if _find(service, process.name).pid != new:
            raise CommandError(f"{process.name} ended while starting; logs: {service.log_dir}")

    addresses = {process.name: process.http_address}
    asyncio.run(wait_until_ready(addresses, check=check, tls=service.has_tls))


def _find(service: ServiceInfo, name: str) -> ServiceProcess:
    for each in running_services():
        if each.pid == service.pid:
            return next(process for process in each.processes if process.name == name)
    raise CommandError(f"the service at {service.http_address} has ended")
