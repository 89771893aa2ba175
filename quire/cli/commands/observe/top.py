"""`quire top`: a live view of queues, sequences, KV and rates."""

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from contract.errors import QuireError
from quire.cli.command_error import CommandError
from quire.cli.settings import TopSettings
from quire.cli.target import connection_errors, find_target, open_client
from quire.cli.top.figures import Snapshot, take_snapshot
from quire.cli.top.view import draw
from quire.cli.up.service_dir import ServiceDirError, ServiceInfo, running_services
from rpc.settings import parse_settings

_QUIT_KEYS: Final = b"qQ\x03\x04"


def main(argv: Sequence[str]) -> int:
    settings = parse_settings(TopSettings, "quire top", argv)
    target = find_target(settings)
    service = _find_service(target)
    console = Console(highlight=False)
    if not (settings.once or console.is_terminal):
        raise CommandError("top: standard output is not a terminal; --once prints one frame")
    with open_client(target, settings) as client:
        with connection_errors(target):
            first = take_snapshot(client, service, settings.max_sequences)
        heading = title(target, service)
        if settings.once:
            time.sleep(settings.interval_s)
            with connection_errors(target):
                now = take_snapshot(client, service, settings.max_sequences)
            console.print(draw(console, heading, first, now))
        else:
            take = partial(take_snapshot, client, service, settings.max_sequences)
            _watch(console, heading, settings.interval_s, first, take)
    return 0


def _watch(
    console: Console,
    heading: str,
    interval_s: float,
    first: Snapshot,
    take: Callable[[], Snapshot],
) -> None:
    """Show frames until q is pressed."""
    before = now = first
    hint = f"{heading}  [dim]q quits[/dim]"
    with (
        _keys() as wait_for_quit,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        live.update(draw(console, hint, before, now), refresh=True)
        while not wait_for_quit(interval_s):
            try:
                before, now = now, take()
                header = hint
            except QuireError as error:  # keep the last figures, because the router may come back
                header = f"{heading}  [red]{escape(str(error))}[/red]"
            live.update(draw(console, header, before, now), refresh=True)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Turn off the terminal's echo; yield a function that waits for the user to quit.

    The function waits for at most the given seconds, and returns whether the user has pressed one
    of `_QUIT_KEYS`.
    """
    if not sys.stdin.isatty():
        yield _sleep
        return
    fd = sys.stdin.fileno()
    former = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield lambda seconds: _quits(fd, seconds)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, former)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _quits(fd: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if not select.select([fd], [], [], left)[0]:
            return False
        if os.read(fd, 1) in _QUIT_KEYS:  # true for b"", too, which means that the terminal is gone
            return True
    return False


def title(target: str, service: ServiceInfo | None) -> str:
    """Return the heading with the service's name and address, as markup."""
    name = "" if service is None else f"  [bold]{escape(service.title)}[/bold]"
    return f"[bold]quire top[/bold]{name}  [dim]{escape(target)}[/dim]"


def _find_service(target: str) -> ServiceInfo | None:
    with contextlib.suppress(ServiceDirError):
        for service in running_services():
            if service.grpc_target == target:
                return service
    return None
