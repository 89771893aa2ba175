"""Runs a worker: starts its servers first, then loads the model."""

import asyncio
from collections.abc import Awaitable, Callable

from gpu_worker.loading.model_slot import ModelSlot
from gpu_worker.operations import LoadingServicer
from gpu_worker.parallel.leader import Leader
from gpu_worker.service.adapters import AdapterServicer
from gpu_worker.service.api import WorkerService
from gpu_worker.settings import WorkerSettings
from rpc.health import Health
from rpc.server import Addresses, serve


class StepsFailedError(Exception):
    """This process can run no more steps; in a new process the device may work again."""


async def run_worker(
    settings: WorkerSettings,
    *,
    on_started: Callable[[Addresses], Awaitable[None]] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or `stop`, then drain.

    While the model loads, the servers already answer, and report how far the loading is.
    `on_started` runs when the worker is ready.

    Raises:
        ModelError: The model cannot be served as the settings ask, or not even one KV block fits.
        StepsFailedError: No step can run in this process any more. The worker has drained before
            this error is raised, so the scheduler knows that the worker ends.
    """
    stop = stop if stop is not None else asyncio.Event()
    health = Health()
    health.set_starting("loading torch")
    service = WorkerService(settings.client_tls)
    adapters = AdapterServicer(service)
    leader = Leader(settings) if settings.num_ranks > 1 else None
    slot = ModelSlot(settings, service, adapters, health, leader=leader, on_failure=stop.set)

    async def start(addresses: Addresses) -> None:
        health.add_liveness("steps", slot.problem)
        await slot.load_first()
        if on_started is not None:
            await on_started(addresses)

    try:
        await serve(
            settings,
            health=health,
            services=[
                service.service(),
                adapters.service(),
                LoadingServicer(service, slot).service(),
            ],
            on_started=start,
            num_live=lambda: service.num_live_seqs,
            on_drain=lambda: service.drain(settings.drain_s / 2),
            stop=stop,
        )
    finally:
        await slot.close()
        if leader is not None:
            await asyncio.to_thread(leader.close)
    if slot.failure is not None:
        raise StepsFailedError(slot.failure)
