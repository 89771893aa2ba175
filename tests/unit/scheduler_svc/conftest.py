"""Fake workers and fake routers around a scheduler."""

import tempfile
from pathlib import Path

import pytest
from recorded_runs import record
from scheduler_fake_worker import FakeWorker
from scheduler_harness import FakeRouter


@pytest.fixture
def folder():
    # pytest's own temporary paths can be longer than a socket's may be.
    with tempfile.TemporaryDirectory(prefix="q-") as path:
        yield Path(path)


@pytest.fixture
async def worker(folder):
    worker = await FakeWorker(f"unix:{folder}/w0").start()
    yield worker
    await worker.die()


@pytest.fixture
async def connect():
    """Connect fake routers; they disconnect at the end."""
    routers = []

    async def connect_router(target, router_id="r"):
        routers.append(FakeRouter(target))
        return await routers[-1].connect(router_id)

    yield connect_router
    for router in routers:
        await router.disconnect()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Record a random run, once per test module; return the recording and its driver."""
    return record(tmp_path_factory.mktemp("recording"))
