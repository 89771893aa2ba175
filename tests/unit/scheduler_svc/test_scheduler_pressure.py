"""A fake worker's memory gets short: fewer sequences run, and all get their tokens."""

import structlog
from scheduler_fake_worker import expected_tokens
from scheduler_harness import running_scheduler

from quire.v1 import common_pb2

OK, WARNING, CRITICAL = (
    common_pb2.MEMORY_LEVEL_OK,
    common_pb2.MEMORY_LEVEL_WARNING,
    common_pb2.MEMORY_LEVEL_CRITICAL,
)


def level_of(scheduler, worker):
    return scheduler.registry.get_sample_value("quire_memory_level", {"worker": worker.target})


async def press(scheduler, worker, router, level):
    """Report a level with the worker's next heartbeat; return when the core knows it."""
    worker.memory_level = level
    while level_of(scheduler, worker) != level - OK:
        await router.load()


async def test_while_memory_is_short_no_sequence_is_added_and_all_get_their_tokens(
    folder, worker, connect
):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        worker.pause()
        for key in range(2):
            await router.submit(key, [key] * 5, max_tokens=60)
        await router.wait_for_live(2)
        await worker.run_until_answered(4)
        await press(scheduler, worker, router, WARNING)
        for key in range(2, 6):
            await router.submit(key, [key] * 5, max_tokens=60)
        await router.wait_for_live(6)
        await worker.run_until_answered(12)
        load = await router.wait_for_load(lambda load: load.num_requests_waiting == 4)
        assert load.num_requests_running == 2
        await press(scheduler, worker, router, OK)
        await worker.run_until_answered(16)
        load = await router.wait_for_load(lambda load: load.num_requests_waiting == 0)
        assert load.num_requests_running == 6
        worker.pause_at = None
        worker.resume()
        await router.read_until_finished(*range(6))
        for key in range(6):
            assert router.tokens[key] == expected_tokens([key] * 5, 60)


async def test_half_are_preempted_when_it_is_critical_and_come_back(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        worker.pause()
        for key in range(6):
            await router.submit(key, [key] * 5, max_tokens=60)
        await router.wait_for_live(6)
        await worker.run_until_answered(4)
        await press(scheduler, worker, router, CRITICAL)
        await worker.run_until_answered(8)
        load = await router.wait_for_load(lambda load: load.num_requests_running == 3)
        assert load.num_requests_waiting == 3
        await press(scheduler, worker, router, OK)
        worker.pause_at = None
        worker.resume()
        await router.read_until_finished(*range(6))
        for key in range(6):
            assert router.tokens[key] == expected_tokens([key] * 5, 60)
        name = "quire_memory_preemptions_total"
        assert scheduler.registry.get_sample_value(name, {"worker": worker.target}) == 3


async def test_an_idle_worker_recovers_and_each_change_is_reported_once(folder, worker, connect):
    with structlog.testing.capture_logs() as logs:
        async with running_scheduler(folder, [worker.target]) as scheduler:
            router = await connect(scheduler.target)
            for level in (CRITICAL, WARNING, OK):
                await press(scheduler, worker, router, level)
            await router.submit(0, [1] * 5, max_tokens=3)
            await router.read_until_finished(0)
    told = [line for line in logs if "memory" in line["event"]]
    assert [(line["log_level"], line["before"], line["level"]) for line in told] == [
        ("warning", "OK", "CRITICAL"),
        ("warning", "CRITICAL", "WARNING"),
        ("info", "WARNING", "OK"),
    ]
