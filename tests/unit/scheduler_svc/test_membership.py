"""Workers that are found and lost while the scheduler runs."""

import asyncio

import pytest
from prometheus_client import generate_latest
from scheduler_fake_worker import FakeWorker, expected_tokens
from scheduler_harness import get, running_scheduler

pytestmark = pytest.mark.timeout(120)


class FakeResolver:
    """A name in DNS, whose addresses a test sets."""

    def __init__(self, *workers):
        self.targets = [worker.target for worker in workers]
        self.num_asked = 0
        self.was_asked = asyncio.Condition()

    async def resolve(self, host, port):
        assert (host, port) == ("worker", 50053)
        async with self.was_asked:
            self.num_asked += 1
            self.was_asked.notify_all()
        return self.targets

    async def wait_until_heeded(self):
        """Wait until DNS's present answer has taken effect: the next look-up comes after that."""
        async with self.was_asked:
            num_asked = self.num_asked + 2
            await self.was_asked.wait_for(lambda: self.num_asked >= num_asked)


@pytest.fixture
async def other(folder):
    worker = await FakeWorker(f"unix:{folder}/w1").start()
    yield worker
    await worker.die()


def discovering(folder, resolver, **options):
    return running_scheduler(
        folder,
        ["dns:worker:50053"],
        resolver=resolver,
        discovery_interval_s=0.01,
        placement="round-robin",
        **options,
    )


async def test_a_worker_that_appears_gets_work(folder, worker, other, connect):
    resolver = FakeResolver(worker)
    async with discovering(folder, resolver) as scheduler:
        router = await connect(scheduler.target)
        resolver.targets.append(other.target)
        await router.wait_for_load(lambda load: load.num_workers == 2)
        for key in range(4):
            await router.submit(key, [key + 1, 2, 3])
        await router.read_until_finished(*range(4))
    assert worker.answered
    assert other.answered
    for key in range(4):
        assert router.tokens[key] == expected_tokens([key + 1, 2, 3], 8)


async def test_one_starts_before_there_is_any_worker(folder, worker, connect):
    resolver = FakeResolver()
    async with discovering(folder, resolver) as scheduler:
        status, said = await get(scheduler, "/ready")
        assert status == 503
        assert "none is found" in str(said)
        resolver.targets.append(worker.target)
        router = await connect(scheduler.target)
        await router.submit(1, [1, 2, 3])
        await router.read_until_finished(1)


async def test_a_worker_that_only_dns_has_lost_works_on(folder, worker, other, connect):
    resolver = FakeResolver(worker, other)
    async with discovering(folder, resolver) as scheduler:
        router = await connect(scheduler.target)
        await router.wait_for_load(lambda load: load.num_workers == 2)
        resolver.targets.remove(worker.target)
        await resolver.wait_until_heeded()
        for key in range(4):
            await router.submit(key, [key + 1, 2, 3])
        await router.read_until_finished(*range(4))
        assert (await router.load()).num_workers == 2
    assert worker.answered


async def test_a_removed_worker_is_forgotten_and_its_sequences_continue_elsewhere(
    folder, worker, other, connect
):
    resolver = FakeResolver(worker)
    async with discovering(folder, resolver) as scheduler:
        router = await connect(scheduler.target)
        worker.pause()
        await router.submit(1, [1, 2, 3], max_tokens=30)
        await worker.run_until_answered(5)
        resolver.targets[:] = [other.target]
        await worker.die()
        await router.read_until_finished(1)
        await resolver.wait_until_heeded()
        metrics = generate_latest(scheduler.registry).decode()
    assert router.tokens[1] == expected_tokens([1, 2, 3], 30)
    assert other.target in metrics
    assert worker.target not in metrics


async def test_a_worker_that_died_and_is_still_in_dns_is_waited_for(folder, worker, connect):
    resolver = FakeResolver(worker)
    async with discovering(folder, resolver) as scheduler:
        router = await connect(scheduler.target)
        worker.pause()
        await router.submit(1, [1, 2, 3], max_tokens=30)
        await worker.run_until_answered(5)
        await worker.die()
        await resolver.wait_until_heeded()
        await worker.start()
        worker.resume()
        await router.read_until_finished(1)
    assert router.tokens[1] == expected_tokens([1, 2, 3], 30)
