"""The messages that wait for a scheduler that does not read; ended requests are removed."""

import gc
import weakref

from contract.request import GenerateRequest
from router.schedulers.outbox import SchedulerOutbox


async def start(router):
    live = await router.inference.generate(GenerateRequest(prompt=(5, 6, 7), n=2))
    return live, await router.scheduler.submits.get()


async def test_submits_and_cancels_go_out(router):
    live, submit = await start(router)
    outbox = SchedulerOutbox()
    outbox.submit(live)
    outbox.cancel([7, 8])
    outbox.cancel([9])
    assert list((await outbox.next()).cancel.seq_keys) == [7, 8, 9]
    assert (await outbox.next()).submit == submit
    await live.aclose()


async def test_a_request_that_ends_before_it_is_written_is_forgotten_and_not_cancelled(router):
    first, _ = await start(router)
    second, submit = await start(router)
    outbox = SchedulerOutbox()
    outbox.submit(first)
    outbox.submit(second)
    assert outbox.drop(first)
    assert not outbox.drop(first)
    assert (await outbox.next()).submit == submit
    assert not outbox.drop(second)
    await first.aclose()
    await second.aclose()


async def test_a_request_is_written_as_it_is_then(router):
    live, submit = await start(router)
    outbox = SchedulerOutbox()
    outbox.submit(live)
    live.push_token(submit.first_seq_key, 70, None, 0.0, None)
    assert len((await outbox.next()).submit.outputs) == 2
    await live.aclose()


async def test_requests_that_end_while_the_scheduler_does_not_read_cost_no_memory(router):
    (link,) = router.inference.schedulers._links
    unread = link._outbox = SchedulerOutbox()  # its messages are not sent
    refs = []
    for _ in range(20):
        live = await router.inference.generate(GenerateRequest(prompt=(5, 6, 7)))
        refs.append(weakref.ref(live))
        await live.aclose()
        del live
    gc.collect()
    assert [ref for ref in refs if ref() is not None] == []
    assert len(unread) == 0
