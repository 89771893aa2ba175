"""A worker that keeps its connection but does not answer: reported, avoided, and given up."""

import asyncio

import pytest
from scheduler_fake_worker import FakeWorker, expected_tokens
from scheduler_harness import get, running_scheduler, wait_until_not_ready

from contract.liveness import heartbeat as silence

pytestmark = pytest.mark.timeout(120)


async def test_worker_that_does_not_answer_a_step_is_lost(folder, worker, connect):
    async with running_scheduler(folder, [worker.target], step_timeout_s=0.3) as scheduler:
        router = await connect(scheduler.target)
        worker.pause()
        await router.submit(0, [1, 2], max_tokens=20)
        _, body = await wait_until_not_ready(scheduler)
        assert "no result after 0.3 s" in body["status"]
        worker.resume()
        await router.read_until_finished(0)
        assert router.tokens[0] == expected_tokens([1, 2], 20)


async def test_idle_worker_is_not_lost(folder, worker, connect):
    async with running_scheduler(folder, [worker.target], step_timeout_s=0.3) as scheduler:
        router = await connect(scheduler.target)
        await router.submit(0, [1], max_tokens=3)
        await router.read_until_finished(0)
        now = asyncio.get_running_loop().time
        until = now() + 0.4  # longer than a step may take, which is the limit under test
        while now() < until:
            assert (await router.load()).num_workers == 1
        await router.submit(1, [1], max_tokens=3)
        await router.read_until_finished(1)
    assert worker.num_attaches == 1


async def test_scheduler_says_when_its_worker_hangs_and_when_it_goes_on(folder, worker, connect):
    # The scheduler does not give the worker up while this test runs.
    async with running_scheduler(folder, [worker.target], worker_silence_s=60) as scheduler:
        router = await connect(scheduler.target)
        worker.hang()
        await router.submit(1, [1, 2, 3], max_tokens=40)
        _, answer = await wait_until_not_ready(scheduler)
        assert "hangs" in answer["status"]
        assert "silent for" in answer["status"]
        assert worker.num_attaches == 1, "it is not given up yet"
        worker.go_on()
        await router.read_until_finished(1)
        assert router.tokens[1] == expected_tokens([1, 2, 3], 40)
        while (await get(scheduler, "/ready"))[0] != 200:
            pass
        assert worker.num_attaches == 1


async def test_sequences_leave_a_worker_that_hangs_on(folder, worker, connect, monkeypatch):
    # Well above a healthy worker's silence between two heartbeats.
    monkeypatch.setattr(silence, "LOST_AFTER_S", 4 * silence.BEAT_S)
    other = await FakeWorker(f"unix:{folder / 'other'}").start()
    try:
        workers = [worker.target, other.target]
        placement = {"placement": "round-robin"}
        async with running_scheduler(folder, workers, **placement) as scheduler:
            router = await connect(scheduler.target)
            await router.wait_for_load(lambda load: load.num_workers == 2)
            for each in (worker, other):
                each.pause()
            for key in (1, 2):
                await router.submit(key, [key, 2, 3], max_tokens=30)
            for each in (worker, other):
                async with each.received_one:
                    await each.received_one.wait_for(lambda each=each: each.received)
            other.resume()
            worker.hang()
            await router.read_until_finished(1, 2)
            assert [router.tokens[key] for key in (1, 2)] == [
                expected_tokens([key, 2, 3], 30) for key in (1, 2)
            ]
            assert len(other.num_computed_before) == 2
            worker.go_on()
    finally:
        await other.die()


async def test_worker_whose_step_takes_much_too_long_is_reported_as_hung(folder, worker, connect):
    """It answers, but its device may hang. It is given up only after --step-timeout-s."""
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        await router.submit(1, [1, 2, 3], max_tokens=20)  # teaches the pacer how long a step takes
        await router.read_until_finished(1)
        worker.pause()
        await router.submit(2, [1, 2, 3], max_tokens=20)
        _, answer = await wait_until_not_ready(scheduler)
        assert "a step has been running" in answer["status"]
        worker.resume()
        await router.read_until_finished(2)
        assert router.tokens[2] == expected_tokens([1, 2, 3], 20)
