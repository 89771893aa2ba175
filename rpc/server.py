"""The servers of a process, gRPC and HTTP in one event loop: start, serve, drain, stop."""

import asyncio
import contextlib
import gc
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
import uvloop
from aiohttp import web
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from quire.v1 import admin_pb2_grpc
from rpc.admin import ADMIN_SERVICE_NAME, AdminServicer
from rpc.file_limit import raise_file_limit
from rpc.grpc_server import (
    CannotListenError,
    Server,
    Service,
    failure_of,
    make_grpc_server,
    start_grpc_server,
)
from rpc.health import HEALTH_SERVICE_NAME, Health, HealthServicer
from rpc.http_server import make_http_runner, start_http_server, start_shared_site
from rpc.observe import logs, telemetry, timeline
from rpc.observe.loop_watch import watching_loop
from rpc.observe.stall_report import LAG, report_stall
from rpc.security.operators import operators
from rpc.settings import ProcessSettings

_FLUSH_S = 2.0
"""Time for calls to send their last bytes after `on_drain`."""

_GC_THRESHOLDS = (10_000, 0, 250)
"""Thresholds of Python's garbage collector, for short collections and rare full collections.

When 10,000 more objects have been allocated than freed since the last collection, a collection
visits the new objects. Every second collection also visits the objects that survived the collection
before. A full collection visits all objects, after five million allocations at the earliest. While
thousands of requests came in one stream, a collection took at most 23 ms. With 25,000 in place of
10,000, a collection took 81 ms."""

log = structlog.get_logger()

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the process listens."""

    grpc: str
    """A gRPC target: "host:port" or "unix:/path"."""
    http: str
    """ "host:port"."""


async def serve(
    settings: ProcessSettings,
    *,
    health: Health,
    services: Sequence[Service],
    http: web.Application | None = None,
    interceptors: Sequence[Any] = (),
    on_started: Callable[[Addresses], Awaitable[None]] | None = None,
    on_drain: Callable[[], Awaitable[None]] | None = None,
    stop: asyncio.Event | None = None,
    num_live: Callable[[], int] = lambda: 0,
    check_operator: Callable[[], None] | None = None,
    drain_worker: Callable[[str], AsyncIterator[int]] | None = None,
    max_received_mb: int | None = None,
    shared_http_port: int | None = None,
    grpc_by_grpcio: bool = True,
    accepts_compressed: bool = False,
) -> None:
    """Serve until SIGTERM, SIGINT or `stop`, then drain.

    gRPC serves `services`, `AdminService`, `grpc.health.v1` and reflection. The server's own
    interceptors handle errors and trace context, and run around `interceptors`. HTTP serves the
    application `http`, and the routes `/health`, `/ready` and `/metrics`. A handler is cancelled
    when its client disconnects.

    `on_started` runs when the gRPC and HTTP servers listen. `serve` never calls
    `health.set_ready`; that is left to the caller.

    To drain, the process first declares itself not ready. Then `on_drain` refuses new requests,
    waits for the live ones and ends long-lived streams, within `settings.drain_s`; calls that
    remain have two seconds more. Without `on_drain`, calls have `settings.drain_s` to end. A second
    SIGTERM, or a second SIGINT, ends the process at once.

    An operator can also start the drain through `AdminService`, which reports the number of live
    requests (`num_live`). `check_operator` raises unless the current call is an operator's;
    `rpc.security.operators` says who is an operator without `check_operator`. For `drain_worker`
    see `rpc.admin`; for `max_received_mb`, `grpc_by_grpcio` and `accepts_compressed` see
    `make_grpc_server`.

    With `shared_http_port`, HTTP listens on that port as well, and other processes may share that
    port and the gRPC port. At the start of a drain, this process closes its sockets at these two
    ports, so that new connections go to the other processes.

    Raises CannotListenError if an address is not available, the errors of `on_started`, and the
    error that ended grpcio's server. After any of these errors the process must end, so that
    another process can listen.
    """
    stopping = stop if stop is not None else asyncio.Event()
    grace_s = settings.drain_s if on_drain is None else _FLUSH_S
    health_servicer = HealthServicer(health, [service.name for service in services])
    admin = AdminServicer(
        stopping,
        num_live=num_live,
        operators=operators(settings, check_operator),
        drain_worker=drain_worker,
    )
    server = make_grpc_server(
        settings,
        services,
        interceptors,
        max_received_mb=max_received_mb,
        shares_port=shared_http_port is not None,
        by_grpcio=grpc_by_grpcio,
        accepts_compressed=accepts_compressed,
    )
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)  # type: ignore[no-untyped-call]
    _add_health_and_reflection(server, settings, services, health_servicer)
    runner = make_http_runner(
        settings, web.Application() if http is None else http, health, grace_s
    )
    shared_site: web.BaseSite | None = None
    leaving: list[Awaitable[None]] = []
    with _signals_set(stopping):
        try:
            addresses = Addresses(
                grpc=await start_grpc_server(server, settings),
                http=await start_http_server(runner, settings),
            )
            failure = failure_of(server)
            if shared_http_port is not None:
                shared_site = await start_shared_site(runner, settings, shared_http_port)
            log.info("listening", grpc=addresses.grpc, http=addresses.http)
            if on_started is not None:
                await _unless(stopping, on_started(addresses))
            with watching_loop(settings.loop_stall_s, report_stall, LAG.observe):
                with _heap_frozen():
                    await _unless(stopping, failure)
                log.info("draining", drain_s=settings.drain_s)
                health.set_draining()
                if shared_site is not None:
                    await shared_site.stop()
                    # `stop` tells clients to reconnect; live calls continue.
                    leaving.append(asyncio.ensure_future(server.stop(settings.drain_s + _FLUSH_S)))
                if on_drain is not None:
                    await _drain(on_drain, settings.drain_s)
        except BaseException:
            grace_s = 0.0
            raise
        finally:
            health_servicer.close()
            admin.close()
            await asyncio.gather(server.stop(grace_s), runner.cleanup(), *leaving)
            log.info("stopped")


async def before_serving(
    settings: ProcessSettings,
    wait: Callable[[], Awaitable[T]],
    *,
    stop: asyncio.Event,
    probes: Health | None = None,
) -> T | None:
    """Await `wait()` in a process that will call `serve` later, and return the result.

    Returns None if SIGTERM, SIGINT or `stop` comes before `wait()` has ended.

    With `probes`, HTTP serves `/health`, `/ready` and `/metrics` while `wait()` runs.

    Raises:
        CannotListenError: The HTTP port is not available.
    """
    with _signals_set(stop):
        if probes is None:
            return await _unless(stop, wait())
        runner = make_http_runner(settings, web.Application(), probes, 0.0)
        try:
            log.info("waiting to serve", http=await start_http_server(runner, settings))
            return await _unless(stop, wait())
        finally:
            await runner.cleanup()


def observe(process: str, settings: ProcessSettings, *, new_trace_ratio: float = 0.0) -> None:
    """Configure the logs, traces and timeline of a process. Call once per process.

    `process` names the process, for example "router". `new_trace_ratio` is the share of traces to
    record, among those that start in this process.
    """
    logs.configure(settings.log_level, settings.log_format, process)
    telemetry.configure(f"quire-{process}", settings, new_trace_ratio=new_trace_ratio)
    timeline.configure(process, settings.timeline_dir)


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a process; each `__main__` calls this. Exits with 1 if an address is not available."""
    # The interval is how long a computing thread may keep the GIL from the event loop. At the
    # default of 5 ms a round trip takes 5.5 ms; at 0.1 ms it takes 0.5 ms.
    sys.setswitchinterval(1e-4)
    raise_file_limit()
    try:
        uvloop.run(main)
    except CannotListenError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None
    finally:
        telemetry.shutdown()
        timeline.write()


def _add_health_and_reflection(
    server: Server,
    settings: ProcessSettings,
    services: Sequence[Service],
    health_servicer: HealthServicer,
) -> None:
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    if settings.reflection:
        names = [service.name for service in services]
        servicer = reflection.aio.ReflectionServicer(  # type: ignore[attr-defined]
            [*names, ADMIN_SERVICE_NAME, HEALTH_SERVICE_NAME, reflection.SERVICE_NAME]
        )
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)


async def _unless(stopping: asyncio.Event, starting: Awaitable[T]) -> T | None:
    """Await `starting`, but cancel it and return None if `stopping` is set first."""
    start = asyncio.ensure_future(starting)
    wait = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait((start, wait), return_when=asyncio.FIRST_COMPLETED)
        return start.result() if start.done() else None
    finally:
        for task in (start, wait):
            task.cancel()
        await asyncio.gather(start, wait, return_exceptions=True)


async def _drain(on_drain: Callable[[], Awaitable[None]], drain_s: float) -> None:
    try:
        async with asyncio.timeout(drain_s):
            await on_drain()
    except TimeoutError:
        log.warning("the drain took too long; remaining requests are cut off", drain_s=drain_s)
    except Exception:  # the process ends in either case
        log.exception("the drain failed")


@contextlib.contextmanager
def _heap_frozen() -> Iterator[None]:
    """During the `with` block, exempt the objects that exist at its start from garbage collection.

    Objects such as the pieces of a vocabulary live as long as the process; a full collection that
    visits them would block the event loop for at least 0.2 s.

    Collections of new objects become rarer (`_GC_THRESHOLDS`): hundreds of streams make thousands
    of objects per step, few of them garbage. With Python's default thresholds, a router spent a
    third of its time on visiting these objects. With thresholds above `_GC_THRESHOLDS`, a
    collection took 0.1 to 0.25 s of processor time while thousands of requests were live.
    """
    gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(*_GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@contextlib.contextmanager
def _signals_set(stopping: asyncio.Event) -> Iterator[None]:
    """During the `with` block, let the first SIGTERM and the first SIGINT set `stopping`."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals; the caller sets `stopping`
        return
    loop = asyncio.get_running_loop()

    def handle(number: signal.Signals) -> None:
        stopping.set()
        loop.remove_signal_handler(number)
        # Restore the default reaction, which works even if the event loop is stuck. Do so for this
        # signal only, because a supervisor may send SIGTERM after a terminal's SIGINT.
        signal.signal(number, signal.SIG_DFL)

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
