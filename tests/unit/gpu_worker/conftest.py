"""Fixtures: a worker behind a real socket, and tiny models that are made once."""

import asyncio

import pytest
import torch
from fake_model import FakeModel, FakePool
from worker_service import INFO, LIMITS, Worker

from gpu_worker.service.api import WorkerService
from gpu_worker.step.executor import Executor
from gpu_worker.step_loop import StepLoop
from tests.models_fixture import ModelDirs
from tests.served_worker import served


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory):
    return ModelDirs(tmp_path_factory.mktemp("models"))


@pytest.fixture
async def worker(tmp_path):
    executor = Executor(
        FakeModel(), FakePool(LIMITS.num_blocks, LIMITS.block_size), LIMITS, (), torch.device("cpu")
    )
    step_loop = StepLoop(executor, asyncio.get_running_loop())
    service = WorkerService()
    service.open(INFO, step_loop)
    async with served(service, tmp_path / "worker.sock") as stub:
        yield Worker(service, step_loop, stub)
    await step_loop.stop()
