"""A scheduler that drains leaves its requests to the next one."""

import grpc
import pytest
from scheduler_fake_worker import expected_tokens
from scheduler_harness import running_scheduler, wait_until_not_ready

from contract.codec.packing import pack_int32
from quire.v1 import scheduler_pb2

pytestmark = pytest.mark.timeout(120)


async def test_drain_answers_the_steps_in_flight_and_leaves_the_rest_to_the_next_scheduler(
    folder, worker, connect
):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        worker.pause()
        await router.submit(0, [1, 2], max_tokens=30)
        await worker.wait_for_batches(2)
        scheduler.stop.set()
        await wait_until_not_ready(scheduler)
        await router.submit(1, [1, 2], max_tokens=30)
        worker.resume()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.read_until_finished(0)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == "the scheduler is shutting down"
        await scheduler.task
    assert router.tokens == {0: expected_tokens([1, 2], 2)}
    assert len(worker.received) == 2
    assert not router.refused, "it would be told to the client; left alone, it is submitted again"


async def test_drain_does_not_wait_for_a_worker_that_does_not_answer(
    folder, worker, connect, monkeypatch
):
    monkeypatch.setattr("scheduler_svc.workers.fleet._HAND_OVER_S", 0.05)
    async with running_scheduler(folder, [worker.target], drain_s=1000) as scheduler:
        router = await connect(scheduler.target)
        worker.pause()
        await router.submit(0, [1, 2], max_tokens=30)
        await worker.wait_for_batches(2)
        scheduler.stop.set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.read_to_end()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await scheduler.task


async def test_next_scheduler_continues_where_the_drained_one_stopped(folder, worker, connect):
    async with running_scheduler(folder, [worker.target], epoch=1) as scheduler:
        before = await connect(scheduler.target)
        await before.submit(0, [1, 2], max_tokens=300)
        await before.read_until(lambda: before.tokens)
        scheduler.stop.set()
        with pytest.raises(grpc.aio.AioRpcError):
            await before.read_until_finished(0)
        await scheduler.task
    assert 0 < len(before.tokens[0]) < 300, "it ended too late to matter"
    output = scheduler_pb2.OutputSoFar(token_ids=pack_int32(before.tokens[0]))
    async with running_scheduler(folder, [worker.target], epoch=2) as scheduler:
        after = await connect(scheduler.target)
        await after.submit(0, [1, 2], max_tokens=300, outputs=[output])
        await after.read_until_finished(0)
    assert before.tokens[0] + after.tokens[0] == expected_tokens([1, 2], 300)


async def test_unclaimed_blocks_do_not_delay_other_requests_for_long(
    folder, worker, connect, monkeypatch
):
    """The scheduler wakes up for this, although no other event comes."""
    for module in ("workers.session", "core.handover.takeover"):
        monkeypatch.setattr(f"scheduler_svc.{module}.REUNION_S", 0.2)
    worker.info.num_blocks = 8
    num_most = 8 * worker.info.block_size
    async with running_scheduler(folder, [worker.target], epoch=1) as scheduler:
        worker.pause()
        gone = await connect(scheduler.target)
        await gone.submit(0, [1] * (num_most // 2), max_tokens=num_most // 2)
        await worker.wait_for_batches(2)
        worker.resume()
    async with running_scheduler(folder, [worker.target], epoch=2, claim_s=1000) as scheduler:
        router = await connect(scheduler.target)
        await router.submit(1, [2] * (num_most - 4), max_tokens=2)
        await router.read_until_finished(1)
    assert router.tokens[1] == expected_tokens([2] * (num_most - 4), 2)
