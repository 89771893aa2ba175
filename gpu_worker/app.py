"""Runs a worker: its servers first, then the model, which takes a while to load."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from gpu_worker.adapter_service import AdapterLoader, AdapterServicer
from gpu_worker.parallel.leader import Leader
from gpu_worker.server import WorkerService
from gpu_worker.settings import WorkerSettings
from rpc.health import Health
from rpc.server import Addresses, serve

if TYPE_CHECKING:
    from gpu_worker.device_memory import MemoryMonitor
    from gpu_worker.step_loop import StepLoop
    from gpu_worker.worker_info import WorkerInfo


class _GaveUpError(Exception):
    """The process ends before the model is loaded."""


class StepsFailedError(Exception):
    """No step can run in this process any more; a new one may find the device well."""


async def run_worker(
    settings: WorkerSettings,
    *,
    on_started: Callable[[Addresses], Awaitable[None]] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or `stop`, then drain.

    The ports answer at once, with how far the start has come. `on_started` runs when the worker is
    ready.

    Raises:
        ModelError: the model cannot be served as the settings ask, or not one KV block fits.
        StepsFailedError: the device failed; the scheduler was told, as by any other drain.
    """
    stop = stop if stop is not None else asyncio.Event()
    health = Health()
    health.set_starting("loading torch")
    service = WorkerService(settings.client_tls)
    adapters = AdapterServicer(service)
    step_loop: StepLoop | None = None
    watch: asyncio.Task[None] | None = None
    gave_up = threading.Event()
    leader = Leader(settings) if settings.num_ranks > 1 else None

    def report(status: str, progress: float | None) -> None:
        if gave_up.is_set():
            raise _GaveUpError
        health.set_starting(status, progress)

    async def start(addresses: Addresses) -> None:
        nonlocal step_loop, watch
        event_loop = asyncio.get_running_loop()
        info, steps, memory, load_adapter = await asyncio.to_thread(
            _load, settings, report, event_loop, leader
        )
        step_loop = steps
        watch = asyncio.create_task(steps.wait_failed(), name="failure of the steps")
        watch.add_done_callback(lambda _: stop.set())
        health.add_liveness("steps", steps.problem)
        service.open(info, steps, memory)
        adapters.open(load_adapter, steps)
        health.set_ready()
        if on_started is not None:
            await on_started(addresses)

    try:
        await serve(
            settings,
            health=health,
            services=[service.service(), adapters.service()],
            on_started=start,
            num_live=lambda: service.num_live_seqs,
            on_drain=lambda: service.drain(settings.drain_s / 2),
            stop=stop,
        )
    finally:
        gave_up.set()
        if watch is not None:
            watch.cancel()
        if step_loop is not None:
            await step_loop.stop()
        if leader is not None:
            await asyncio.to_thread(leader.close)
    if step_loop is not None and step_loop.failure is not None:
        raise StepsFailedError(step_loop.failure)


def _load(
    settings: WorkerSettings,
    report: Callable[[str, float | None], None],
    event_loop: asyncio.AbstractEventLoop,
    leader: Leader | None,
) -> "tuple[WorkerInfo, StepLoop, MemoryMonitor, AdapterLoader]":
    # Here and not above: torch takes seconds to import, and the ports should answer before.
    from gpu_worker.loading import load  # noqa: PLC0415

    return load(settings, report, event_loop, leader)
