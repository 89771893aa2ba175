"""A request that moves from router to router, at a scheduler process with a fake worker."""

import pytest
from scheduler_fake_worker import expected_tokens
from scheduler_harness import running_scheduler

from quire.v1 import common_pb2

pytestmark = pytest.mark.timeout(120)

PROMPT = [1, 2, 3, 4, 5]
ABORTED, NOT_FOUND = 10, 5


async def begin(router, worker, **options):
    """Start a request; it has its first tokens, and the worker is paused."""
    await router.submit(7, PROMPT, n=2, max_tokens=30, resume_record=b"x", **options)
    await router.read_until(lambda: len(router.tokens.get(8, ())) >= 3)
    worker.pause()


def has_all(router, first):
    return {key: router.tokens[key] for key in (first, first + 1)} == {
        first: expected_tokens(PROMPT, 30),
        first + 1: expected_tokens(PROMPT, 30, 1),
    }


async def test_another_router_goes_on_where_the_first_one_died(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        first, second = await connect(scheduler.target), await connect(scheduler.target, "s")
        await begin(first, worker)
        await first.disconnect()
        await second.resume("request-7", 40)
        await second.read_until(lambda: 40 in second.resumed)
        assert second.resumed[40].resume_record == b"x"
        worker.resume()
        await second.read_until_finished(40, 41)
        assert has_all(second, 40)
        await second.wait_for_live(0)


async def test_what_has_ended_meanwhile_is_there_to_be_had(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        first, second = await connect(scheduler.target), await connect(scheduler.target, "s")
        await begin(first, worker)
        await first.leave(7, 8)
        worker.resume()
        await second.wait_for_live(0)
        await second.resume("request-7", 40)
        await second.read_until_finished(40, 41)
        assert has_all(second, 40)
        assert second.finished[40].finish_reason == common_pb2.FINISH_REASON_LENGTH


async def test_the_former_router_gets_aborted_and_no_more_events(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        first, second = await connect(scheduler.target), await connect(scheduler.target, "s")
        await begin(first, worker)
        await second.resume("request-7", 40)
        await second.read_until(lambda: 40 in second.resumed)
        await first.read_until(lambda: 7 in first.refused)
        assert first.refused[7].code == ABORTED
        await second.cancel(40, 41)
        worker.resume()
        await second.read_until_finished(40, 41)
        assert second.finished[41].finish_reason == common_pb2.FINISH_REASON_CANCELLED


@pytest.mark.parametrize("last_word", ["leave", "cancel"])
async def test_late_messages_of_the_former_router_end_nothing(folder, worker, connect, last_word):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        first, second = await connect(scheduler.target), await connect(scheduler.target, "s")
        await begin(first, worker)
        await second.resume("request-7", 40)
        await second.read_until(lambda: 40 in second.resumed)
        # as if this router did not know yet that the request has moved
        await getattr(first, last_word)(7, 8)
        await first.submit(20, PROMPT, max_tokens=1)
        worker.resume()
        await first.read_until_finished(20)
        await second.read_until_finished(40, 41)
        assert has_all(second, 40)


async def test_a_request_that_is_not_resumed_ends(folder, worker, connect):
    async with running_scheduler(folder, [worker.target], resume_grace_s=0.1) as scheduler:
        first, second = await connect(scheduler.target), await connect(scheduler.target, "s")
        await begin(first, worker)
        await first.disconnect()
        await second.wait_for_live(0)
        await second.resume("request-7", 40)
        await second.read_until(lambda: 40 in second.refused)
        assert second.refused[40].code == NOT_FOUND
        worker.resume()
        await second.wait_for_load(
            lambda load: load.num_free_blocks + load.num_cached_blocks == load.num_blocks
        )


@pytest.mark.parametrize("leaves", [True, False])
async def test_without_a_grace_period_a_request_ends_with_its_reader(
    folder, worker, connect, leaves
):
    async with running_scheduler(folder, [worker.target], resume_grace_s=0) as scheduler:
        first, second = await connect(scheduler.target), await connect(scheduler.target, "s")
        await begin(first, worker)
        await (first.leave(7, 8) if leaves else first.disconnect())
        worker.resume()
        await second.wait_for_live(0)
        await second.resume("request-7", 40)
        await second.read_until(lambda: 40 in second.refused)
        assert second.refused[40].code == NOT_FOUND


async def test_a_router_that_lost_its_stream_goes_on_with_what_it_has(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        first = await connect(scheduler.target)
        await begin(first, worker)
        await first.disconnect()
        again = await connect(scheduler.target)
        await again.submit(7, PROMPT, n=2, max_tokens=30, resume_record=b"x")
        worker.resume()
        await again.read_until_finished(7, 8)
        assert has_all(again, 7)
        await again.wait_for_live(0)
