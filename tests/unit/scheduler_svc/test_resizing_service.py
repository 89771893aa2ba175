"""`ResizeKv` grows and shrinks a worker's pool under load, or is refused with a reason."""

import asyncio

import grpc
import pytest
from scheduler_fake_worker import FakeWorker, expected_tokens
from scheduler_harness import FakeRouter, running_scheduler

from quire.v1 import scheduler_pb2

BLOCK_SIZE, LEAST, MOST = 4, 16, 64  # of 512 tokens; the pool begins with LEAST


@pytest.fixture
async def worker(tmp_path):
    fake = FakeWorker(
        f"unix:{tmp_path}/w",
        num_blocks=LEAST,
        max_num_blocks=MOST,
        block_size=BLOCK_SIZE,
        block_bytes=1000,
    )
    await fake.start()
    yield fake
    await fake.die()


async def resize(router, num_blocks, worker=""):
    """Resize a pool, and return all messages about it."""
    request = scheduler_pb2.ResizeKvRequest(worker=worker, num_blocks=num_blocks)
    return [answer async for answer in router.stub.ResizeKv(request)]


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


async def num_blocks(router):
    return (await router.load()).num_blocks


async def test_a_pool_that_has_grown_takes_what_was_too_long(tmp_path, worker):
    async with running_scheduler(tmp_path, [worker.target]) as scheduler:
        router = await FakeRouter(scheduler.target).connect()
        prompt = list(range(60))
        await router.submit(0, prompt, max_tokens=20)
        await router.read_until(lambda: 0 in router.refused)
        *_, last = await resize(router, 40, worker.target)
        assert (last.num_blocks_before, last.num_blocks, last.is_done) == (16, 40, True)
        assert await num_blocks(router) == 40
        await router.disconnect()  # the welcome says how long a sequence may be
        router = await FakeRouter(scheduler.target).connect()
        assert router.welcome.model.max_model_len == 160
        await router.submit(1, prompt, max_tokens=20)
        await router.read_until_finished(1)
        assert router.tokens[1] == expected_tokens(prompt, 20)
        await router.disconnect()


async def test_a_connected_router_gets_the_new_max_model_len(tmp_path, worker):
    async with running_scheduler(tmp_path, [worker.target]) as scheduler:
        router = await FakeRouter(scheduler.target).connect()
        assert router.welcome.model.max_model_len == 64
        await resize(router, 40)
        await router.read_until(lambda: router.messages)
        (told,) = router.messages
        assert told.step == scheduler_pb2.StepOutput(max_model_len=160)
        await router.disconnect()


async def test_a_pool_shrinks_under_sequences_that_go_on(tmp_path, worker):
    """Blocks move to lower numbers, and some sequences are preempted."""
    async with running_scheduler(tmp_path, [worker.target]) as scheduler:
        router = await FakeRouter(scheduler.target).connect()
        await resize(router, MOST)
        worker.pause()
        for key in range(6):
            await router.submit(key, [key] * 30, max_tokens=20)
        await router.wait_for_live(6)
        await worker.run_until_answered(4)
        assert len(worker.rows) == 6
        assert max(max(row.blocks) for row in worker.rows.values()) > LEAST
        shrinking = asyncio.create_task(resize(router, LEAST))
        worker.resume()
        worker.pause_at = None
        *_, last = await shrinking
        assert (last.num_blocks, last.num_leaving_blocks, last.is_done) == (LEAST, 0, True)
        assert worker.info.num_blocks == await num_blocks(router) == LEAST
        await router.read_until_finished(*range(6))
        for key in range(6):
            assert router.tokens[key] == expected_tokens([key] * 30, 20)
        await router.disconnect()


async def test_held_blocks_are_reported_while_a_pool_shrinks(tmp_path, worker):
    async with running_scheduler(tmp_path, [worker.target]) as scheduler:
        router = await FakeRouter(scheduler.target).connect()
        await resize(router, MOST)
        worker.pause()
        for key in range(6):
            await router.submit(key, [key] * 30, max_tokens=20)
        await router.wait_for_live(6)
        await worker.run_until_answered(4)
        request = scheduler_pb2.ResizeKvRequest(num_blocks=LEAST)
        call = router.stub.ResizeKv(request)
        first = await call.read()
        assert (first.num_blocks_before, first.num_blocks, first.block_bytes) == (64, 16, 1000)
        assert first.num_leaving_blocks > 0
        assert not first.is_done
        code, details = await refusal(resize(router, 32))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert details == f"worker {worker.target} is being resized already, to 16 blocks"
        call.cancel()  # the resize continues
        worker.pause_at = None
        worker.resume()
        await router.read_until_finished(*range(6))
        await worker.was_asked_to_resize.wait()
        while await num_blocks(router) != LEAST:
            pass
        await router.disconnect()


@pytest.mark.parametrize("size", [{"num_blocks": 40}, {"num_bytes": 40_999}], ids=str)
async def test_a_size_is_blocks_or_bytes(tmp_path, worker, size):
    async with running_scheduler(tmp_path, [worker.target]) as scheduler:
        router = await FakeRouter(scheduler.target).connect()
        request = scheduler_pb2.ResizeKvRequest(**size)
        *_, last = [answer async for answer in router.stub.ResizeKv(request)]
        assert last.num_blocks == worker.info.num_blocks == 40
        await router.disconnect()


@pytest.mark.parametrize(
    ("size", "code", "details"),
    [
        ({}, "INVALID_ARGUMENT", "size is not set; it must be num_blocks or num_bytes"),
        (
            {"num_blocks": 65},
            "FAILED_PRECONDITION",
            "num_blocks is 65; the worker has reserved room for at most 64",
        ),
        (
            {"num_bytes": 15_999},
            "FAILED_PRECONDITION",
            "num_blocks is 15; it must be at least 16, which is enough for one sequence",
        ),
        (
            {"num_blocks": 20, "worker": "nobody"},
            "NOT_FOUND",
            "worker 'nobody' is not one of this scheduler's",
        ),
    ],
    ids=lambda value: str(value)[:24],
)
async def test_impossible_values_are_refused_by_name(tmp_path, worker, size, code, details):
    async with running_scheduler(tmp_path, [worker.target]) as scheduler:
        router = await FakeRouter(scheduler.target).connect()
        call = router.stub.ResizeKv(scheduler_pb2.ResizeKvRequest(**size))
        found, said = await refusal(call.read())
        assert (found.name, said[: len(details)]) == (code, details)
        assert await num_blocks(router) == LEAST
        await router.disconnect()


async def test_of_several_workers_one_must_be_named(tmp_path, worker):
    fixed = await FakeWorker(f"unix:{tmp_path}/v", num_blocks=LEAST, block_size=4).start()
    try:
        async with running_scheduler(tmp_path, [worker.target, fixed.target]) as scheduler:
            router = await FakeRouter(scheduler.target).connect()
            code, details = await refusal(resize(router, 20))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert details.startswith("worker is empty; of 2 workers it must be one: ")
            await router.wait_for_load(lambda load: load.num_blocks == 2 * LEAST)
            code, details = await refusal(resize(router, 20, fixed.target))
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert details == "num_blocks is 20; it is fixed at 16 by the worker"
            await router.disconnect()
    finally:
        await fixed.die()


async def test_a_worker_without_the_memory_leaves_all_as_it_was(tmp_path, worker):
    async with running_scheduler(tmp_path, [worker.target]) as scheduler:
        router = await FakeRouter(scheduler.target).connect()
        worker.resize_error = "num_blocks is 40: the device has no such room left"
        code, details = await refusal(resize(router, 40))
        assert (code, details) == (grpc.StatusCode.FAILED_PRECONDITION, worker.resize_error)
        assert await num_blocks(router) == LEAST
        worker.resize_error = None
        await resize(router, 40)
        worker.resize_error = "no"
        assert (await refusal(resize(router, 20)))[1] == "no"
        load = await router.load()
        assert (load.num_blocks, load.num_free_blocks) == (40, 40)
        worker.resize_error = None
        await resize(router, 20)
        assert await num_blocks(router) == 20
        await router.disconnect()


async def test_a_lost_worker_reports_its_blocks_when_it_returns(tmp_path, worker):
    async with running_scheduler(tmp_path, [worker.target]) as scheduler:
        router = await FakeRouter(scheduler.target).connect()
        await resize(router, MOST)
        worker.may_resize.clear()
        shrinking = asyncio.create_task(refusal(resize(router, 20)))
        await worker.was_asked_to_resize.wait()
        await worker.die()
        assert (await shrinking)[0] is grpc.StatusCode.UNAVAILABLE
        worker.info.num_blocks = 20  # the worker had resized already
        await worker.start()
        load = await router.wait_for_load(lambda load: load.num_blocks == 20)
        assert load.num_free_blocks == 20
        await router.submit(0, [1] * 30, max_tokens=20)
        await router.read_until_finished(0)
        assert router.tokens[0] == expected_tokens([1] * 30, 20)
        await router.disconnect()


async def test_the_next_scheduler_goes_on_with_the_present_size(tmp_path, worker):
    async with running_scheduler(tmp_path, [worker.target]) as scheduler:
        router = await FakeRouter(scheduler.target).connect()
        await resize(router, 50)
        await router.disconnect()
    async with running_scheduler(tmp_path, [worker.target], socket="t") as scheduler:
        router = await FakeRouter(scheduler.target).connect()
        assert await num_blocks(router) == 50
        *_, last = await resize(router, 40)
        assert (last.num_blocks_before, last.num_blocks) == (50, 40)
        await router.disconnect()
