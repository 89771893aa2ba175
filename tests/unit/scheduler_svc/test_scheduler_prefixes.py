"""Requests that wait until a worker has their prefix: they count as its load, and go there."""

import asyncio
import contextlib

import pytest
from scheduler_fake_worker import FakeWorker, expected_tokens
from scheduler_harness import FakeRouter, running_scheduler

from quire.v1 import worker_pb2

pytestmark = pytest.mark.timeout(120)


def prompt(first):
    return [first, *range(1, 300)]


class FarWorker(FakeWorker):
    """A worker with an empty far tier, which answers when the test permits it."""

    def __init__(self, target):
        super().__init__(target, block_bytes=64)
        self.info.has_far_kv = True
        self.info.num_host_blocks = 256
        self.info.prefill_tokens_per_s = 1
        self.num_fetches = 0
        self.may_fetch = asyncio.Event()

    async def FetchKv(self, request, context):  # noqa: ARG002, N802
        self.num_fetches += 1
        await self.may_fetch.wait()
        return worker_pb2.FetchKvResponse()

    async def StoreKv(self, request, context):  # noqa: ARG002, N802
        return worker_pb2.StoreKvResponse()


@contextlib.asynccontextmanager
async def service(folder, num_workers, **options):
    workers = [FarWorker(f"unix:{folder}/w{number}") for number in range(num_workers)]
    for worker in workers:
        await worker.start()
    try:
        async with running_scheduler(folder, [each.target for each in workers], **options) as it:
            router = await FakeRouter(it.target).connect()
            await router.wait_for_load(lambda load: load.num_workers == num_workers)
            yield router, workers
            await router.disconnect()
    finally:
        for worker in workers:
            await worker.die()


async def test_a_request_goes_to_the_worker_to_which_its_prefix_has_come(tmp_path):
    async with service(tmp_path, 2, placement="round-robin") as (router, workers):
        for key in (1, 2, 3):
            await router.submit(key, prompt(key), max_tokens=2)
            await router.read_until(lambda: any(each.num_fetches for each in workers))
            (chosen,) = (each for each in workers if each.num_fetches)
            chosen.may_fetch.set()
            await router.read_until_finished(key)
            assert router.tokens[key] == expected_tokens(prompt(key), 2)
            assert key in chosen.announced_at
            chosen.num_fetches = 0
            chosen.may_fetch.clear()


async def test_requests_that_wait_for_their_prefix_count_as_waiting(tmp_path):
    async with service(tmp_path, 1, max_waiting=2) as (router, (worker,)):
        for key in (1, 2):
            await router.submit(key, prompt(key), max_tokens=2)
        await router.submit(3, prompt(3), max_tokens=2)
        await router.read_until(lambda: 3 in router.refused)
        assert "the queue is full: 2 sequences wait" in router.refused[3].message
        await router.cancel(1)
        await router.read_until_finished(1)
        await router.submit(4, prompt(4), max_tokens=2)
        worker.may_fetch.set()
        await router.read_until_finished(2, 4)
        assert not {2, 4} & router.refused.keys()
