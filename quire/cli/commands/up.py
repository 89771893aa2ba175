"""`quire up`: starts a service on this machine, shows its start, looks after it."""

import asyncio
import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from quire.cli.command_error import CommandError
from quire.cli.commands.probe import wait_until_ready
from quire.cli.invocation import invocation
from quire.cli.up import layout, ports
from quire.cli.up.child import describe_exit, wait_for
from quire.cli.up.layout import Layout
from quire.cli.up.progress import Display, make_display
from quire.cli.up.service_dir import (
    ServiceDir,
    ServiceDirError,
    ServiceInfo,
    ServiceProcess,
    find_service,
    running_services,
)
from quire.cli.up.settings import UpSettings
from quire.cli.up.supervisor import Running, StartError, Supervisor
from quire.cli.up.welcome import how_to_use, start_demo
from rpc.settings import parse_settings

_FOLLOW_S: Final = 0.2


def main(argv: Sequence[str]) -> int:
    """Run `quire up`; give the exit code."""
    settings = parse_settings(UpSettings, "quire up", argv)
    try:
        model = layout.find_model(settings)
        already = _find_running(settings)
        if already is not None:
            return _already_up(settings, model, already)
        chosen = layout.choose_ports(settings)
        directory = ServiceDir.create()
    except (layout.ModelError, ports.PortError, ServiceDirError) as error:
        raise CommandError(str(error)) from None
    planned = layout.plan(settings, model, chosen, directory.path, os.environ)
    if settings.detach:
        return _detach(settings, planned, directory)
    return _supervise(settings, planned, directory, make_display())


def _find_running(settings: UpSettings) -> ServiceInfo | None:
    return find_service(
        list(running_services()),
        http_address=ports.join(ports.reachable(settings.host), settings.http_port),
        grpc_target=layout.grpc_target(settings, settings.grpc_port),
    )


def _already_up(settings: UpSettings, model: Path, service: ServiceInfo) -> int:
    if Path(service.model) != model:
        raise CommandError(
            f"--http-port: {settings.http_port}: a service of {service.model} is up there"
            f" (pid {service.pid}); stop it with `{invocation()} down`, or choose other ports"
        )
    print(f"{service.model_name} is already up, as it was started (pid {service.pid}).")
    print(
        how_to_use(
            service.http_address, service.grpc_target, service.model_name, tls=service.has_tls
        )
    )
    return start_demo(service.grpc_target, settings).wait() if settings.demo else 0


def _supervise(
    settings: UpSettings, planned: Layout, directory: ServiceDir, display: Display
) -> int:
    try:
        asyncio.run(_serve(settings, planned, directory, display))
    except StartError as error:
        raise CommandError(f"{error}\nall logs: {directory.log_dir}") from None
    directory.remove()
    return 0


async def _serve(
    settings: UpSettings, planned: Layout, directory: ServiceDir, display: Display
) -> None:
    def publish(running: Sequence[Running]) -> None:
        # A full disk makes `quire status` out of date, no more.
        with contextlib.suppress(OSError):
            directory.write(_info(planned, directory, running))

    supervisor = Supervisor(
        planned.specs,
        directory.log_dir,
        drain_s=settings.drain_s,
        report=_say,
        on_change=publish,
    )
    with _signals(supervisor.stop), _attached(settings, supervisor.stop):
        running = asyncio.create_task(supervisor.run())
        helpers = [asyncio.create_task(_welcome(settings, planned, supervisor, display))]
        if settings.verbose:
            names = [spec.name for spec in planned.specs]
            helpers.append(asyncio.create_task(_follow(directory.log_dir, names)))
        for helper in helpers:
            # One that fails is a bug, and must not leave the service half looked after.
            helper.add_done_callback(lambda done: supervisor.stop() if _failed(done) else None)
        try:
            await running
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.wait(helpers)
        for helper in helpers:
            if _failed(helper):
                helper.result()


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None


async def _welcome(
    settings: UpSettings, planned: Layout, supervisor: Supervisor, display: Display
) -> None:
    """Show the start; once ready, tell how to use the service."""
    started_at = time.monotonic()
    try:
        await wait_until_ready(_addresses(planned), display.show, tls=planned.has_tls)
    finally:
        display.close()
    supervisor.mark_started()
    print(f"{planned.model_name} is up after {time.monotonic() - started_at:.1f} s.")
    print(
        how_to_use(
            planned.http_address, planned.grpc_target, planned.model_name, tls=planned.has_tls
        )
    )
    if settings.demo:
        await wait_for(start_demo(planned.grpc_target, settings))
    print("Ctrl-C stops it.", flush=True)


def _detach(settings: UpSettings, planned: Layout, directory: ServiceDir) -> int:
    """Fork: the child supervises, the parent waits until the service is ready."""
    failure, report_failure = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    # No thread has been started yet, so forking is safe, and cheaper than starting Python again.
    pid = os.fork()
    if pid == 0:
        _become_daemon(settings, planned, directory, report_failure)
    os.close(report_failure)
    directory.release()
    display = make_display()

    def check() -> None:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with os.fdopen(failure) as reported:
                end = describe_exit(os.waitstatus_to_exitcode(status))
                raise CommandError(reported.read() or f"the supervisor {end}")

    started_at = time.monotonic()
    try:
        asyncio.run(wait_until_ready(_addresses(planned), display.show, check, tls=planned.has_tls))
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        raise
    finally:
        display.close()
    print(f"{planned.model_name} is up after {time.monotonic() - started_at:.1f} s (pid {pid}).")
    print(
        how_to_use(
            planned.http_address, planned.grpc_target, planned.model_name, tls=planned.has_tls
        )
    )
    print(f"logs: {directory.log_dir}", flush=True)
    return start_demo(planned.grpc_target, settings).wait() if settings.demo else 0


def _become_daemon(
    settings: UpSettings, planned: Layout, directory: ServiceDir, report_failure: int
) -> None:
    """Supervise, away from the terminal; a failure goes to the pipe, too. Never returns."""
    code = 1
    try:
        os.setsid()
        log = os.open(directory.log_dir / "up.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, number in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, number)
        quiet = settings.model_copy(update={"demo": False, "verbose": False})
        code = _supervise(quiet, planned, directory, make_display())
    except CommandError as error:
        print(error)
        os.write(report_failure, str(error).encode())
    except BaseException:  # noqa: BLE001 - a bug: the log is all that is left of us
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _addresses(planned: Layout) -> dict[str, str]:
    return {spec.name: spec.http_address for spec in planned.specs}


def _info(planned: Layout, directory: ServiceDir, running: Sequence[Running]) -> ServiceInfo:
    return ServiceInfo(
        pid=os.getpid(),
        model=str(planned.model),
        model_name=planned.model_name,
        http_address=planned.http_address,
        grpc_target=planned.grpc_target,
        scheduler_target=planned.scheduler_target,
        has_tls=planned.has_tls,
        log_dir=str(directory.log_dir),
        processes=tuple(
            ServiceProcess(each.spec.name, each.spec.http_address, each.pid, each.num_restarts)
            for each in running
        ),
    )


def _say(line: str) -> None:
    # A full disk or a closed terminal must not end the service.
    with contextlib.suppress(OSError):
        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


async def _follow(log_dir: Path, names: Sequence[str]) -> None:
    """Show what is added to the logs, each line with its process's name."""
    with contextlib.ExitStack() as stack:
        files = {}
        while True:
            for name in names:
                path = log_dir / f"{name}.log"
                if name not in files and path.exists():
                    files[name] = stack.enter_context(path.open(errors="replace"))
                for line in files.get(name, ()):
                    print(f"{name:<10} | {line.rstrip()}", flush=True)
            await asyncio.sleep(_FOLLOW_S)


@contextlib.contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    """Let each signal that asks us to end call `stop`; two of them call it twice."""
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
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
    """Let the end of standard input call `stop`, if that is asked for."""
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
