"""The scheduler's log of steps, and its report."""

import grpc
import numpy as np
import pytest
from scheduler_fake_worker import FakeWorker
from scheduler_harness import running_scheduler

from contract.step import Plan, StepId
from quire.v1 import common_pb2, scheduler_pb2
from scheduler_svc.core.reports.load import Queues
from scheduler_svc.observers.step_log import MAX_STEPS, StepLog
from scheduler_svc.observers.steps import AnsweredStep, SentStep

TWO = np.array([4, 5], np.int32)


def plan(step_id, *, num_decodes=0, num_prefill_tokens=0, **more) -> Plan:
    return Plan(
        StepId(step_id),
        num_decodes,
        chunk_rows=np.array([0], np.int32),
        chunk_lens=np.array([num_prefill_tokens], np.int32),
        **more,
    )


def sent(plan, queues):
    return SentStep(plan, 0, queues, 0.0)


def test_a_step_is_reported_when_its_result_comes():
    log = StepLog()
    log.on_sent(
        SentStep(plan(1, num_prefill_tokens=7, swap_in_src_block_ids=TWO), 0, Queues(1, 2, 0), 0.0)
    )
    log.on_sent(
        SentStep(plan(2, num_decodes=3, swap_out_src_block_ids=TWO), 0, Queues(3, 1, 2), 0.0)
    )
    assert log.latest(10, 0) == ()
    log.on_answered(AnsweredStep(0, 0.5, 0.75, 0.0, 100.0))
    (first,) = log.latest(10, 0)
    assert (first.num_prefill_tokens, first.num_decode_tokens) == (7, 0)
    assert (first.execute_s, first.rpc_s, first.answered_at_s) == (0.5, 0.75, 100.0)
    assert (first.num_swapped_in_blocks, first.num_swapped_out_blocks) == (2, 0)
    log.on_answered(AnsweredStep(0, 0.25, 0.5, 0.0, 101.0))
    second = log.latest(10, 0)[1]
    assert (second.num_running, second.num_waiting, second.num_preemptions) == (3, 1, 2)
    assert (second.num_swapped_in_blocks, second.num_swapped_out_blocks) == (0, 2)
    totals = log.totals
    assert (totals.num_steps, totals.num_prefill_tokens, totals.num_decode_tokens) == (2, 7, 3)
    assert totals.busy_s == 0.75


def test_preemptions_are_those_since_the_step_before():
    log = StepLog()
    for step_id, num_preemptions in enumerate((1, 1, 4), start=1):
        log.on_sent(sent(plan(step_id), Queues(0, 0, num_preemptions)))
        log.on_answered(AnsweredStep(0, 0.1, 0.1, 0.0, 0.0))
    assert [step.num_preemptions for step in log.latest(10, 0)] == [1, 0, 3]


def test_the_latest_steps_are_remembered_and_asked_for_in_order():
    log = StepLog()
    for step_id in range(1, MAX_STEPS + 11):
        log.on_sent(sent(plan(step_id), Queues(0, 0, 0)))
        log.on_answered(AnsweredStep(0, 0.0, 0.0, 0.0, 0.0))
    last = MAX_STEPS + 10
    assert [step.step_id for step in log.latest(3, 0)] == [last - 2, last - 1, last]
    assert [step.step_id for step in log.latest(10, last - 2)] == [last - 1, last]
    assert log.latest(10, last) == ()
    assert len(log.latest(MAX_STEPS, 0)) == MAX_STEPS
    assert log.totals.num_steps == last


async def describe(router, **query):
    query = common_pb2.ActivityQuery(**query)
    request = scheduler_pb2.DescribeSchedulerActivityRequest(query=query)
    return (await router.stub.DescribeSchedulerActivity(request)).workers


async def test_the_scheduler_reports_each_workers_activity(folder, worker, connect):
    other = await FakeWorker(f"unix:{folder}/w2").start()
    async with running_scheduler(folder, [worker.target, other.target]) as scheduler:
        router = await connect(scheduler.target)
        await router.wait_for_load(lambda load: load.num_workers == 2)
        await router.submit(7, [1, 2, 3, 4, 5], max_tokens=4)
        await router.read_until_finished(7)
        workers = await describe(router)
        assert [each.worker for each in workers] == [worker.target, other.target]
        (busy,) = [each for each in workers if each.num_steps]
        assert busy.num_prefill_tokens == 5
        assert busy.num_decode_tokens >= 3  # and at most one step that was computed in vain
        assert busy.load.num_blocks == 256
        assert len(busy.steps) == busy.num_steps
        assert sum(step.num_decode_tokens for step in busy.steps) == busy.num_decode_tokens
        last = busy.steps[-1].step_id
        (later,) = await describe(router, worker=busy.worker, after_step_id=last - 1)
        assert [step.step_id for step in later.steps][:1] == [last]
        assert not (await describe(router, worker=busy.worker, max_steps=0))[0].steps
    await other.die()


@pytest.mark.parametrize(
    ("query", "code", "words"),
    [
        ({"worker": "nowhere"}, "NOT_FOUND", "'nowhere' is not one of this scheduler's"),
        ({"max_steps": 1025}, "INVALID_ARGUMENT", "query.max_steps is 1025"),
        ({"after_step_id": 3}, "INVALID_ARGUMENT", "query.after_step_id is 3, but query.worker"),
    ],
)
async def test_a_query_that_cannot_be_answered_is_refused(
    folder, worker, connect, query, code, words
):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await describe(router, **query)
        assert refused.value.code().name == code
        assert words in refused.value.details()
