"""Workers that report that they drain."""

import asyncio

import grpc
import pytest
from scheduler_fake_worker import FakeWorker, expected_tokens
from scheduler_harness import running_scheduler

from quire.v1 import admin_pb2, admin_pb2_grpc
from rpc.peers.channel import open_channel

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def other(folder):
    worker = await FakeWorker(f"unix:{folder}/w1").start()
    yield worker
    await worker.die()


async def test_sequences_of_a_worker_that_drains_go_on_at_another(folder, worker, other, connect):
    workers = [worker.target, other.target]
    async with running_scheduler(folder, workers, placement="round-robin") as scheduler:
        router = await connect(scheduler.target)
        await router.wait_for_load(lambda load: load.num_workers == 2)
        worker.pause()
        other.pause()
        for key in range(8):
            await router.submit(key, [key + 1, 2, 3], max_tokens=60)
        await router.wait_for_live(8)
        await worker.run_until_answered(5)
        worker.attach_error = grpc.StatusCode.UNAVAILABLE
        worker.is_leaving.set()
        worker.resume()
        await worker.was_left.wait()
        assert worker.answered == worker.received, "no step is in vain"
        num_steps = len(worker.received)
        for key in range(8, 12):
            await router.submit(key, [key + 1, 2, 3], max_tokens=60)
        other.resume()
        await router.read_until_finished(*range(12))
        assert len(worker.received) == num_steps
    for key in range(12):
        assert router.tokens[key] == expected_tokens([key + 1, 2, 3], 60)


async def test_sequences_of_the_only_worker_wait_for_the_next_one(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        worker.pause()
        await router.submit(1, [1, 2, 3], max_tokens=60)
        await worker.run_until_answered(5)
        worker.attach_error = grpc.StatusCode.UNAVAILABLE
        worker.is_leaving.set()
        worker.resume()
        await worker.was_left.wait()
        await worker.die()
        await router.submit(2, [2, 2, 3], max_tokens=60)
        worker.attach_error = None
        worker.is_leaving = asyncio.Event()
        await worker.start()
        await router.read_until_finished(1, 2)
    for key in (1, 2):
        assert router.tokens[key] == expected_tokens([key, 2, 3], 60)


async def test_a_scheduler_has_the_worker_drain_that_is_named(folder, worker, other, connect):
    async with running_scheduler(folder, [worker.target, other.target]) as scheduler:
        router = await connect(scheduler.target)
        await router.wait_for_load(lambda load: load.num_workers == 2)
        async with open_channel(scheduler.target) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            call = stub.Drain(admin_pb2.DrainRequest(worker=other.target))
            assert [told.num_live async for told in call] == [3, 0]
            assert (worker.num_drains, other.num_drains) == (0, 1)
            call = stub.Drain(admin_pb2.DrainRequest(worker="nowhere:1"))
            assert await call.code() is grpc.StatusCode.NOT_FOUND
            assert worker.target in await call.details()
