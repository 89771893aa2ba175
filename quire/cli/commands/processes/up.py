"""`quire up`: starts a service on this machine, shows the progress, and keeps it running."""

import asyncio
import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NoReturn

from model_files.errors import ModelError
from quire.cli.command_error import CommandError
from quire.cli.invocation import invocation
from quire.cli.readiness import wait_until_ready
from quire.cli.up import layout, ports
from quire.cli.up.child import describe_exit
from quire.cli.up.layout import Layout
from quire.cli.up.log_files import LogFiles
from quire.cli.up.progress import make_display
from quire.cli.up.service_dir import (
    ServiceDir,
    ServiceDirError,
    ServiceInfo,
    ServiceProcess,
    running_services,
)
from quire.cli.up.settings import UpSettings
from quire.cli.up.supervisor import StartError, Supervisor
from quire.cli.up.welcome import how_to_use, run_demo
from rpc.observe.loop_watch import Stall, watching_loop
from rpc.settings import parse_settings

_FOLLOW_S: Final = 0.2


def main(argv: Sequence[str]) -> int:
    settings = parse_settings(UpSettings, "quire up", argv)
    try:
        models = layout.choose_models(settings)
        if (already := _find_running(settings)) is not None:
            return _already_up(settings, models, already)
        chosen = layout.choose_ports(settings)
        directory = ServiceDir.create()
    except (ModelError, ports.PortError, ServiceDirError) as error:
        raise CommandError(str(error)) from None
    planned = layout.plan(settings, models, chosen, directory.path, os.environ)
    if settings.detach:
        return _detach(settings, planned, directory)
    return _supervise(settings, planned, directory)


def _find_running(settings: UpSettings) -> ServiceInfo | None:
    http_address = ports.join(ports.reachable(settings.host), settings.http_port)
    grpc_target = layout.grpc_target(settings, settings.grpc_port)
    for service in running_services():
        if (service.http_address, service.grpc_target) == (http_address, grpc_target):
            return service
    return None


def _already_up(settings: UpSettings, models: Mapping[str, str], service: ServiceInfo) -> int:
    served = [*service.models.values()] or [service.model]
    if served != [*models.values()]:
        raise CommandError(
            f"--http-port: {settings.http_port}: a service of {', '.join(served)} has this port"
            f" (pid {service.pid}); stop it with `{invocation()} down`, or choose other ports"
        )
    given = layout.described_flags(settings, settings.model_fields_set)
    differences = [
        f"--{name.replace('_', '-')} is {there}, and {value} is given"
        for name, value in given.items()
        if (there := service.flags.get(name, value)) != value
    ]
    if differences:
        raise CommandError(
            f"{service.title} is up there (pid {service.pid}) with other flags:"
            f" {'; '.join(differences)}; stop it with `{invocation()} down`, or choose other ports"
        )
    print(f"{service.title} is already up, with the flags it was started with (pid {service.pid}).")
    print(how_to_use(service))
    return asyncio.run(run_demo(service, settings)) if settings.demo else 0


def _supervise(settings: UpSettings, planned: Layout, directory: ServiceDir) -> int:
    try:
        asyncio.run(_serve(settings, planned, directory))
    except StartError as error:
        raise CommandError(f"{error}\nall logs: {directory.log_dir}") from None
    if settings.attached:  # the parent program shows its own output
        directory.remove()
    else:
        directory.leave()
    return 0


async def _serve(settings: UpSettings, planned: Layout, directory: ServiceDir) -> None:
    """Run the processes until a signal comes, or until one of them fails to start."""
    info = replace(planned.service, pid=os.getpid())  # `_detach` has forked since the plan

    def publish(processes: Sequence[ServiceProcess]) -> None:
        # If the disk is full, only `quire status` is out of date.
        with contextlib.suppress(OSError):
            directory.write(replace(info, processes=tuple(processes)))

    supervisor = Supervisor(
        planned.specs,
        directory.log_dir,
        drain_s=settings.drain_s,
        report=_report,
        on_change=publish,
    )

    async def welcome() -> None:
        await _show_start(planned)
        supervisor.mark_started()
        print(how_to_use(info))
        if settings.demo:
            await run_demo(info, settings)
        print("Ctrl-C stops it.", flush=True)

    async def help_with(work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except Exception:  # a bug: stop the service; `_serve` then raises the error
            supervisor.stop()
            raise

    with (
        _signals(supervisor.stop),
        _attached(settings, supervisor.stop),
        watching_loop(settings.loop_stall_s, _report_stall),
    ):
        helpers = [asyncio.create_task(help_with(welcome()))]
        if settings.verbose:
            names = [spec.name for spec in planned.specs]
            following = _follow(directory.log_dir, names)
            helpers.append(asyncio.create_task(help_with(following)))
        try:
            await supervisor.run()
        finally:
            for helper in helpers:
                helper.cancel()
            results = await asyncio.gather(*helpers, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result


async def _show_start(planned: Layout, check: Callable[[], None] = lambda: None) -> None:
    """Show the progress until all processes are ready, and then how long the start took.

    Until all are ready, `check` is called again and again; `check` may raise an error.
    """
    started_at = time.monotonic()
    display = make_display()
    addresses = {spec.name: spec.http_address for spec in planned.specs}
    try:
        await wait_until_ready(addresses, display.show, check, tls=planned.service.has_tls)
    finally:
        display.close()
    print(f"{planned.service.title} is up after {time.monotonic() - started_at:.1f} s.")


def _detach(settings: UpSettings, planned: Layout, directory: ServiceDir) -> int:
    """Fork. The child supervises; the parent waits until the service is ready."""
    failure, report_failure = os.pipe()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _exit)
    sys.stdout.flush()
    sys.stderr.flush()
    # No thread has been started yet, so a fork is safe, and cheaper than a new interpreter.
    pid = os.fork()
    if pid == 0:
        _become_daemon(settings, planned, directory, report_failure)
    os.close(report_failure)
    directory.release()

    def check() -> None:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with os.fdopen(failure) as reported:
                end = describe_exit(os.waitstatus_to_exitcode(status))
                raise CommandError(reported.read() or f"the supervisor {end}")

    try:
        asyncio.run(_show_start(planned, check))
    except (KeyboardInterrupt, SystemExit):
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        raise
    print(how_to_use(planned.service))
    print(f"supervisor pid {pid}, logs {directory.log_dir}", flush=True)
    return asyncio.run(run_demo(planned.service, settings)) if settings.demo else 0


def _exit(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def _become_daemon(
    settings: UpSettings, planned: Layout, directory: ServiceDir, report_failure: int
) -> None:
    """Supervise without a terminal, and exit. Errors go to the log.

    A CommandError is also written to `report_failure`, the pipe that `_detach` reads.
    """
    code = 1
    try:
        os.setsid()
        log = os.open(directory.log_dir / "up.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, number in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, number)
        quiet = settings.model_copy(update={"demo": False, "verbose": False})
        code = _supervise(quiet, planned, directory)
    except CommandError as error:
        print(error)
        os.write(report_failure, str(error).encode())
    except BaseException:  # noqa: BLE001 - a bug, which goes to the log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _report_stall(stall: Stall) -> None:
    state = "did" if stall.is_over else "does"
    _report(f"the supervisor {state} not run for {stall.lasted_s:.1f} s; its stack:\n{stall.stack}")


def _report(line: str) -> None:
    # A full disk or a closed terminal must not end the service.
    with contextlib.suppress(OSError):
        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


async def _follow(log_dir: Path, names: Sequence[str]) -> None:
    """Print new lines of the logs, each after the name of its process."""
    with contextlib.closing(LogFiles(log_dir, tuple(names))) as files:
        while True:
            for name, line in files.new_lines():
                print(f"{name:<10} | {line}", flush=True)
            await asyncio.sleep(_FOLLOW_S)


@contextlib.contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at each signal that asks the process to end."""
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores this signal
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _attached(settings: UpSettings, stop: Callable[[], None]) -> Iterator[None]:
    """If --attached is set, call `stop` when standard input ends."""
    if not settings.attached:
        yield
        return
    loop = asyncio.get_running_loop()
    stdin = sys.stdin.fileno()

    def read() -> None:
        if not os.read(stdin, 4096):
            loop.remove_reader(stdin)
            stop()

    try:
        loop.add_reader(stdin, read)
    except PermissionError:
        raise CommandError("--attached: standard input must be a pipe or a terminal") from None
    try:
        yield
    finally:
        loop.remove_reader(stdin)
