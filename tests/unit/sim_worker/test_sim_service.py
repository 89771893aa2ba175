"""A scheduler with simulated workers: placement, preemption, recording and replay."""

import asyncio
import contextlib
import tempfile
from pathlib import Path

import pytest

from quire.v1 import common_pb2
from scheduler_svc.journal.replay import replay
from scheduler_svc.journal.report import describe
from sim_worker.app import run_sim_workers
from sim_worker.settings import SimWorkerSettings
from tests.unit.scheduler_svc.scheduler_harness import FakeRouter, running_scheduler


@pytest.fixture
def folder():
    # pytest's own temporary paths can be longer than a socket's may be.
    with tempfile.TemporaryDirectory(prefix="q-") as path:
        yield Path(path)


@contextlib.asynccontextmanager
async def sim_workers(folder, count, **changes):
    """Run a process with `count` workers; yield their targets."""
    settings = SimWorkerSettings(
        uds=folder / "w.sock", http_port=0, count=count, vocab_size=100, speedup=1000.0, **changes
    )
    started, stop = asyncio.Event(), asyncio.Event()

    async def on_started(addresses):
        del addresses
        started.set()

    task = asyncio.create_task(run_sim_workers(settings, on_started=on_started, stop=stop))
    waiting = asyncio.create_task(started.wait())
    await asyncio.wait([waiting, task], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    try:
        yield [f"unix:{settings.of_worker(index).uds}" for index in range(count)]
    finally:
        stop.set()
        await task


async def serve(folder, targets, num_requests, max_tokens, **options):
    """Return each request's tokens."""
    async with running_scheduler(folder, targets, **options) as scheduler:
        router = FakeRouter(scheduler.target)
        await router.connect()
        await router.wait_for_load(lambda load: load.num_workers == len(targets))
        for key in range(num_requests):
            await router.submit(key, [5, 6, 7, key % 50], max_tokens=max_tokens, seed=key)
        await router.read_until_finished(*range(num_requests))
        await router.disconnect()
        return router.tokens


def replay_file(path):
    with path.open("rb") as file:
        return replay(file)


async def test_many_workers_share_the_work(folder):
    async with sim_workers(folder, 8) as targets:
        tokens = await serve(folder, targets, 32, 20, record=folder / "rec")
    assert all(len(output) == 20 for output in tokens.values())
    replays = [replay_file(path) for path in (folder / "rec").iterdir()]
    assert [each.num_requests for each in replays] == [4] * 8
    assert [each.difference for each in replays] == [None] * 8


async def test_searches_find_the_same_when_they_are_preempted(folder):
    """All tokens are equally likely, so the order in which a worker lists them decides."""

    async def found(targets, **options):
        async with running_scheduler(folder, targets, **options) as scheduler:
            router = FakeRouter(scheduler.target)
            await router.connect()
            for key in range(0, 12, 2):
                beam = common_pb2.BeamSearch(width=3)
                await router.submit(key, [5, 6, key], max_tokens=20, n=2, seed=key, beam=beam)
            await router.read_until_finished(*range(12))
            load = await router.load()
            await router.disconnect()
            return router.tokens, load

    async with sim_workers(folder, 1) as targets:
        calm, _ = await found(targets, epoch=1)
    async with sim_workers(folder, 1, num_blocks=20, block_size=4) as targets:
        crowded, load = await found(targets, epoch=2, record=folder / "rec")
    assert crowded == calm
    assert [len(tokens) for tokens in calm.values()] == [20] * 12
    assert load.num_free_blocks + load.num_cached_blocks == load.num_blocks
    (path,) = (folder / "rec").iterdir()
    result = replay_file(path)
    assert result.difference is None
    assert any(preemption.num_beams for preemption in result.preemptions)


async def test_a_run_that_preempts_gives_the_same_tokens_and_is_explained(folder):
    async with sim_workers(folder, 1) as targets:
        calm = await serve(folder, targets, 12, 40, epoch=1)
    async with sim_workers(folder, 1, num_blocks=12, block_size=4) as targets:
        crowded = await serve(folder, targets, 12, 40, epoch=2, record=folder / "rec")
    assert crowded == calm
    (path,) = (folder / "rec").iterdir()
    result = replay_file(path)
    assert result.difference is None
    assert len(result.preemptions) > 0
    assert all(preemption.num_recomputed_tokens for preemption in result.preemptions)
    assert "preemption 1, planning step" in "\n".join(describe(result))
