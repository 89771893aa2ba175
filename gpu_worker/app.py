"""Builds a worker from its settings and runs it: the one place that constructs collaborators."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import structlog

from gpu_worker import metrics
from gpu_worker.server import WorkerService
from gpu_worker.settings import WorkerSettings
from gpu_worker.step import Limits
from gpu_worker.worker_info import WorkerInfo
from rpc.health import Health
from rpc.server import Addresses, serve

if TYPE_CHECKING:
    from gpu_worker.executor import Executor
    from gpu_worker.step_loop import StepLoop

_T = TypeVar("_T")

_log = structlog.get_logger()


async def run_worker(
    settings: WorkerSettings,
    *,
    on_started: Callable[[Addresses], Awaitable[None]] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or `stop`, then drain.

    The ports answer at once, with what the start is doing; then torch and the weights are loaded.
    `on_started` runs when the worker is ready.

    Raises:
        ModelError: the model cannot be served.
        TooLittleMemoryError: not one KV block fits.
    """
    health = Health()
    health.set_starting("loading torch")
    service = WorkerService()
    step_loop: StepLoop | None = None

    async def start(addresses: Addresses) -> None:
        nonlocal step_loop
        info, executor = await _in_thread(lambda: _load(settings, health))
        from gpu_worker.step_loop import StepLoop  # noqa: PLC0415 - imports torch

        step_loop = StepLoop(executor)
        health.add_liveness("steps", step_loop.problem)
        service.open(info, step_loop)
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
        if step_loop is not None:
            await step_loop.stop()


def _load(settings: WorkerSettings, health: Health) -> "tuple[WorkerInfo, Executor]":
    """Load the model and build what executes its steps; runs in a thread, for seconds."""
    # Here and not above: torch takes seconds to import, and the ports should answer before.
    from gpu_worker.device import device_name, pick_device, pick_dtype, set_num_threads  # noqa: PLC0415
    from gpu_worker.executor import Executor  # noqa: PLC0415
    from gpu_worker.kv_pool import KvPool  # noqa: PLC0415
    from gpu_worker.model_config import load_model_config  # noqa: PLC0415
    from gpu_worker.weights import load_weights  # noqa: PLC0415

    device = pick_device(settings.device)
    num_threads = set_num_threads(settings.num_threads)
    config = load_model_config(settings.model)
    dtype = pick_dtype(settings.dtype, config, device)
