"""A scheduler with fake workers: defragmentation on demand, and pinned prompts."""

import asyncio

import grpc
import pytest
from scheduler_fake_worker import FakeWorker, expected_tokens
from scheduler_harness import running_scheduler, wait_until_not_ready


async def make_holes(router):
    """Run four sequences, and end two of them, so that held blocks are between free ones."""
    for key in range(4):
        await router.submit(key, [10 + key] * 7, max_tokens=100)
    await router.read_until(lambda: all(router.tokens.get(key) for key in range(4)))
    await router.cancel(0, 2)
    await router.read_until_finished(0, 2)


async def test_blocks_move_on_demand_while_sequences_run(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        await make_holes(router)
        (report,) = await router.defragment()
        assert report.worker == worker.target
        assert report.num_moved_blocks > 0
        await router.read_until_finished(1, 3)
        for key in (1, 3):
            assert router.tokens[key] == expected_tokens([10 + key] * 7, 100)
        load = await router.load()
        assert load.num_moved_blocks == report.num_moved_blocks


async def test_an_idle_worker_has_nothing_to_move(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        (report,) = await router.defragment()
        assert (report.num_moved_blocks, report.rate_before, report.rate_after) == (0, 0, 0)


async def test_each_worker_is_asked(folder, connect):
    workers = [await FakeWorker(f"unix:{folder}/w{i}").start() for i in range(2)]
    async with running_scheduler(folder, [worker.target for worker in workers]) as scheduler:
        router = await connect(scheduler.target)
        while (await router.load()).num_workers < 2:
            pass
        assert {r.worker for r in await router.defragment()} == {w.target for w in workers}
    for worker in workers:
        await worker.die()


async def test_a_worker_that_is_lost_meanwhile_fails_the_call(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        await make_holes(router)
        worker.pause()
        call = asyncio.create_task(router.defragment())
        await router.load()  # by now it has most likely been requested
        await worker.die()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await wait_until_not_ready(scheduler)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.defragment()
        assert caught.value.details() == "no worker is attached"


async def test_a_pinned_prompt_is_reported_and_counted(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        await router.submit(1, [5] * 10, max_tokens=1, cache_pin_s=60)
        await router.read_until_finished(1)
        assert router.pinned == {1: 8}, "two full blocks of four"
        assert (await router.load()).num_pinned_blocks == 2


@pytest.mark.parametrize("seconds", [0.0, 86401.0, float("nan")])
async def test_a_pin_out_of_range_is_refused(folder, worker, connect, seconds):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        await router.submit(1, [5] * 10, cache_pin_s=seconds)
        await router.read_until(lambda: router.refused)
        assert "cache_pin_s is " in router.refused[1].message
