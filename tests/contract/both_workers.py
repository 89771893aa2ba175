"""Serves the real and the simulated worker, each on a socket."""

import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path

from worker_calls import LIMITS, MAX_BLOCKS

from contract.info import WorkerInfo
from gpu_worker.service.api import WorkerService
from tests.served_worker import served

INFO = WorkerInfo("w0", "cpu", "fake", LIMITS, (96,), 64, "float32", max_num_blocks=MAX_BLOCKS)
FAKE_MODEL = Path(__file__).parents[1] / "unit" / "gpu_worker"


@contextlib.asynccontextmanager
async def real_steps():
    """The real step loop and executor, with the unit tests' fake model."""
    sys.path.insert(0, str(FAKE_MODEL))
    try:
        from fake_model import FakeModel, FakePool  # noqa: PLC0415 - they need torch
    finally:
        sys.path.remove(str(FAKE_MODEL))
    from torch import device, uint8  # noqa: PLC0415

    from gpu_worker.kv.disk_pool import DiskPool  # noqa: PLC0415
    from gpu_worker.kv.host_pool import HostPool  # noqa: PLC0415
    from gpu_worker.step.executor import Executor  # noqa: PLC0415
    from gpu_worker.step_loop import StepLoop  # noqa: PLC0415

    pool = FakePool(LIMITS.num_blocks, LIMITS.block_size, MAX_BLOCKS)
    blocks = pool.slots.view(MAX_BLOCKS, -1).view(uint8)
    host = HostPool(blocks, LIMITS.num_host_blocks, has_checksums=True)
    disk = DiskPool(host.blocks, LIMITS.num_disk_blocks, Path(tempfile.gettempdir()))
    executor = Executor(
        FakeModel(), pool, LIMITS, (96,), device("cpu"), host_pool=host, disk_pool=disk
    )
    steps = StepLoop(executor, asyncio.get_running_loop())
    yield steps
    await steps.stop()


@contextlib.asynccontextmanager
async def simulated_steps():
    from sim_worker.steps import SimulatedSteps  # noqa: PLC0415 - as the other
    from sim_worker.time_model import TimeModel  # noqa: PLC0415

    yield SimulatedSteps(
        LIMITS,
        eos_token_ids=(96,),
        mean_output_len=None,
        time_model=TimeModel(1e9, 1000, 1e12, 1e14, 1e9, 1e6),
        speedup=10.0,
        block_bytes=INFO.block_bytes,
    )


@contextlib.asynccontextmanager
async def served_steps(open_steps, folder):
    """Yield a stub of a worker whose steps `open_steps` runs."""
    async with open_steps() as steps:
        service = WorkerService()
        service.open(INFO, steps)
        async with served(service, f"{folder}/worker.sock") as stub:
            yield stub
