"""The time at which the next step is sent while one is in flight."""

import asyncio

import pytest
from scheduler_fake_worker import expected_tokens
from scheduler_harness import running_scheduler

pytestmark = pytest.mark.timeout(120)


async def learn_step_time(router, worker, execute_s):
    """Let the scheduler learn from a prompt of four tokens and a decode of this duration."""
    worker.execute_s = execute_s
    await router.submit(0, [1, 2, 3, 4], max_tokens=2)
    await router.read_until_finished(0)
    await worker.wait_for_batches(3)  # the last batch releases the row
    while len(worker.answered) < 3:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(0)


@pytest.mark.parametrize(("execute_s", "num_ahead"), [(0.0, 2), (1.0, 1)])
async def test_requests_that_arrive_during_a_long_step_are_in_the_next_one(
    folder, worker, connect, execute_s, num_ahead
):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        await learn_step_time(router, worker, execute_s)
        worker.pause()
        await router.submit(1, [5, 6, 7, 8], max_tokens=4)
        await worker.wait_for_batches(3 + num_ahead)
        await router.submit(2, [6, 7, 8, 9], max_tokens=4)
        await router.wait_for_live(2)
        worker.execute_s = 0.0
        worker.resume()
        await router.read_until_finished(1, 2)
        assert worker.announced_at[6] - worker.announced_at[5] == num_ahead
        assert router.tokens[1] == expected_tokens([5, 6, 7, 8], 4)
        assert router.tokens[2] == expected_tokens([6, 7, 8, 9], 4)


async def test_after_a_step_that_ends_early_the_next_one_is_sent_at_once(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        await learn_step_time(router, worker, 1.0)
        worker.execute_s = 0.0
        await router.submit(1, [5, 6, 7, 8], max_tokens=20)
        await router.read_until_finished(1)
        assert router.tokens[1] == expected_tokens([5, 6, 7, 8], 20)


async def test_the_next_step_goes_out_when_it_is_due_though_nothing_has_happened(
    folder, worker, connect
):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        await learn_step_time(router, worker, 0.2)
        worker.pause()
        await router.submit(1, [5, 6, 7, 8], max_tokens=4)
        await worker.wait_for_batches(3 + 2)
        assert len(worker.answered) == 3
        worker.resume()
        await router.read_until_finished(1)
        assert router.tokens[1] == expected_tokens([5, 6, 7, 8], 4)
