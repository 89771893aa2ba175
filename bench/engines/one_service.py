"""Runs the whole service in one process and one event loop: router, scheduler and worker.

    python -m engines.one_service --model DIR --uds SOCKET --http-port PORT

The code is that of the three processes, but they hand messages over as objects (in_process.py). The
worker's steps run in their own thread, as always, but here the thread shares Python's lock with the
whole service. Clients reach the router's gRPC at the socket and its HTTP at the port. The flags are
the worker's.
"""

import asyncio
import contextlib
from unittest.mock import patch

from engines.in_process import Links

from gpu_worker.app import run_worker
from gpu_worker.rank_process import prepare_environment
from gpu_worker.settings import WorkerSettings
from router.app import run_router
from router.settings import RouterSettings
from rpc.observe import logs
from rpc.server import Addresses, run
from rpc.settings import parse_settings
from scheduler_svc.app import run_scheduler
from scheduler_svc.settings import SchedulerSettings


async def _main(settings: WorkerSettings) -> None:
    links = Links()
    is_loaded, stop = asyncio.Event(), asyncio.Event()

    async def loaded(_: Addresses) -> None:
        is_loaded.set()

    with contextlib.ExitStack() as stack:
        for app in ("gpu_worker.app", "scheduler_svc.app"):
            stack.enter_context(patch(f"{app}.serve", links.serve))
        stack.enter_context(links.joined())
        async with asyncio.TaskGroup() as services:
            services.create_task(run_worker(settings, on_started=loaded, stop=stop))
            await is_loaded.wait()
            services.create_task(run_scheduler(SchedulerSettings(), stop=stop))
            await run_router(
                RouterSettings(
                    model=settings.model,
                    served_model_name=settings.served_model_name,
                    uds=settings.uds,
                    http_port=settings.http_port,
                )
            )
            stop.set()


if __name__ == "__main__":
    parsed = parse_settings(WorkerSettings, "engines.one_service")
    prepare_environment(parsed.master_addr)  # before torch is imported
    logs.configure(parsed.log_level, parsed.log_format, "one-service")
    run(_main(parsed))
