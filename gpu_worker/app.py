"""Runs a worker: its servers first, then the model, which takes a while to load."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from gpu_worker.server import WorkerService
from gpu_worker.settings import WorkerSettings
from rpc.health import Health
from rpc.server import Addresses, serve

if TYPE_CHECKING:
    from gpu_worker.step_loop import StepLoop
    from gpu_worker.worker_info import WorkerInfo


class _GaveUpError(Exception):
    """The process ends before the model is loaded."""


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
    """
    health = Health()
    health.set_starting("loading torch")
    service = WorkerService()
    step_loop: StepLoop | None = None
    gave_up = threading.Event()

    def report(status: str, progress: float | None) -> None:
        if gave_up.is_set():
            raise _GaveUpError
        health.set_starting(status, progress)

    async def start(addresses: Addresses) -> None:
        nonlocal step_loop
        event_loop = asyncio.get_running_loop()
        info, steps = await asyncio.to_thread(_load, settings, report, event_loop)
        step_loop = steps
        health.add_liveness("steps", steps.problem)
        service.open(info, steps)
        health.set_ready()
        if on_started is not None:
            await on_started(addresses)

    try:
        await serve(
            settings,
            health=health,
            services=[service.service()],
            on_started=start,
            on_drain=service.drain,
            stop=stop,
        )
    finally:
        gave_up.set()
        if step_loop is not None:
            await step_loop.stop()


def _load(
    settings: WorkerSettings,
    report: Callable[[str, float | None], None],
    event_loop: asyncio.AbstractEventLoop,
) -> "tuple[WorkerInfo, StepLoop]":
    # Here and not above: torch takes seconds to import, and the ports should answer before.
    from gpu_worker.loading import load  # noqa: PLC0415

    return load(settings, report, event_loop)
