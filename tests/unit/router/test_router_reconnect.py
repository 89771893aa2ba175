"""A scheduler that is lost and comes back: live requests continue exactly where they were."""

import asyncio

import grpc
import numpy as np
import pytest
from router_fake_scheduler import LENGTH, FakeScheduler

from contract.errors import UnavailableError
from contract.liveness import heartbeat as silence
from contract.outputs import FinishReason, OutputDelta, OutputFinished, Usage
from contract.request import GenerateRequest
from router.schedulers.link import LinkConfig, SchedulerLink


async def start(router, **kwargs):
    live = await router.inference.generate(GenerateRequest(prompt=(5, 6, 7), **kwargs))
    return live, await router.scheduler.submits.get()


async def lose_scheduler(router):
    lost = asyncio.Event()
    router.health.on_change(lambda: None if router.health.ready else lost.set())
    await router.scheduler.stop()
    await lost.wait()


async def test_not_ready_and_new_requests_are_refused_while_there_is_no_scheduler(router):
    await lose_scheduler(router)
    assert not router.health.ready
    with pytest.raises(UnavailableError, match="scheduler"):
        await router.inference.generate(GenerateRequest(prompt="a"))
    with pytest.raises(UnavailableError):
        await router.cells.load()
    await router.scheduler.start()
    await router.ready.wait()
    live, _ = await start(router)
    await live.aclose()


async def test_a_live_request_is_submitted_again_with_its_tokens_and_nothing_is_lost(router):
    live, submit = await start(router, n=2)
    first = submit.first_seq_key
    tokens = router.tokens("one two three 🙂 four")
    half = len(tokens) // 2
    await router.scheduler.step({first: tokens[:half], first + 1: tokens[:1]}, admitted={first: 2})
    await router.scheduler.step(finished={first + 1: LENGTH})
    events = []
    while not any(isinstance(event, OutputFinished) for event in events):
        events.append(await anext(live))

    await lose_scheduler(router)
    await router.scheduler.start()
    again = await router.scheduler.submits.get()
    assert [list(np.frombuffer(o.token_ids, "<i4")) for o in again.outputs] == [
        tokens[:half],
        tokens[:1],
    ]
    assert [o.finished for o in again.outputs] == [False, True]
    del again.outputs[:]
    submit.is_again = True
    assert again == submit

    await router.scheduler.step({first: tokens[half:]}, admitted={first: 3})
    await router.scheduler.step(finished={first: LENGTH})
    events += [event async for event in live]
    deltas = [e for e in events if isinstance(e, OutputDelta) and e.output_index == 0]
    assert [t for d in deltas for t in d.token_ids] == tokens
    assert "".join(d.text for d in deltas) == "one two three 🙂 four"
    assert [d.token_offset for d in deltas] == [
        sum(len(d.token_ids) for d in deltas[:i]) for i in range(len(deltas))
    ]
    assert events[-1] == Usage(3, len(tokens) + 1, 2)


async def test_requests_that_ended_while_there_was_no_scheduler_are_not_submitted_again(router):
    left, _ = await start(router)
    kept, submit = await start(router)
    stopped, stopped_submit = await start(router, stop=("a",))
    await router.scheduler.step({stopped_submit.first_seq_key: router.tokens("a")})
    await router.scheduler.cancels.get()
    await lose_scheduler(router)
    await left.aclose()
    await router.scheduler.start()
    submit.is_again = True
    assert (await router.scheduler.submits.get()) == submit
    await router.ready.wait()
    fresh = asyncio.create_task(start(router))
    await stopped.aclose()
    live, fresh_submit = await fresh
    assert fresh_submit.first_seq_key not in (submit.first_seq_key, stopped_submit.first_seq_key)
    for request in (live, kept):
        await request.aclose()


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE], ids=["full", "drain"]
)
async def test_a_full_queue_or_a_drain_does_not_undo_an_acceptance(router, code):
    live, submit = await start(router)
    key = submit.first_seq_key
    await router.scheduler.step({key: [70]})
    assert isinstance(await anext(live), OutputDelta)
    await lose_scheduler(router)
    await router.scheduler.start()
    again = await router.scheduler.submits.get()
    await router.scheduler.refuse(key, code, "not now", retry_after_s=0.01)
    assert await router.scheduler.submits.get() == again
    await router.scheduler.step({key: [71]}, finished={key: LENGTH})
    delta, finished, _ = [event async for event in live]
    assert (delta.token_offset, delta.token_ids) == (1, (71,))
    assert finished.finish_reason is FinishReason.LENGTH


async def test_a_refusal_after_acceptance_is_the_end_of_each_output(router):
    live, submit = await start(router)
    await router.scheduler.step({submit.first_seq_key: [70]})
    assert isinstance(await anext(live), OutputDelta)
    await lose_scheduler(router)
    await router.scheduler.start()
    await router.scheduler.submits.get()
    await router.scheduler.refuse(submit.first_seq_key, grpc.StatusCode.INTERNAL, "a bug")
    finished, _ = [event async for event in live]
    assert finished.finish_reason is FinishReason.ERROR
    assert not finished.error.retryable
    assert finished.error.message == "a bug"


@pytest.mark.parametrize(("name", "value"), [("vocab_size", 501), ("model_id", "others")])
async def test_another_model_ends_live_requests_instead_of_continuing_in_nonsense(
    router, name, value
):
    live, submit = await start(router)
    await router.scheduler.step({submit.first_seq_key: [70]})
    assert isinstance(await anext(live), OutputDelta)
    await lose_scheduler(router)
    setattr(router.scheduler, name, value)
    await router.scheduler.start()
    finished, _ = [event async for event in live]
    assert finished.finish_reason is FinishReason.ERROR
    assert router.scheduler.submits.empty()
    await router.ready.wait()  # the new model is served


async def test_a_model_that_lacks_tokens_of_the_tokenizer_is_not_served(router):
    live, submit = await start(router)
    await router.scheduler.step({submit.first_seq_key: [70]})
    assert isinstance(await anext(live), OutputDelta)
    await lose_scheduler(router)
    num_tokens = len(router.inference.text._tokenizer.table.pieces)
    router.scheduler.vocab_size = num_tokens - 1
    refused = asyncio.Event()
    router.health.on_change(
        lambda: refused.set() if "tokenizer" in router.health.status else refused.clear()
    )
    await router.scheduler.start()
    finished, _ = [event async for event in live]
    assert finished.error.retryable
    await refused.wait()
    assert not router.health.ready
    words = f"{num_tokens} token ids.*'weights'.* {num_tokens - 1}"
    with pytest.raises(UnavailableError, match=words):
        await router.inference.generate(GenerateRequest(prompt="a"))
    with pytest.raises(UnavailableError, match=words):
        await router.cells.load()
    assert router.inference.model.infos() == ()

    await router.scheduler.stop()
    router.scheduler.vocab_size = num_tokens  # as many as it needs
    await router.scheduler.start()
    await router.ready.wait()
    (await start(router))[0]._close()


async def test_a_scheduler_that_breaks_the_contract_is_left_and_tried_again(router):
    live, submit = await start(router)
    await router.scheduler.routers.get()
    await router.scheduler._stream.write(router.scheduler._welcome())  # a second one
    await router.scheduler.routers.get()  # a new stream
    submit.is_again = True
    assert await router.scheduler.submits.get() == submit
    await live.aclose()


async def test_not_ready_while_the_scheduler_hangs_and_its_requests_go_on_when_it_does(router):
    live, submit = await start(router)
    changed = asyncio.Event()
    router.health.on_change(changed.set)
    router.scheduler.lives.clear()
    await changed.wait()
    assert not router.health.ready
    assert "has been silent" in router.health.status
    changed.clear()
    router.scheduler.lives.set()
    await changed.wait()
    assert router.health.ready
    await router.scheduler.step(
        {submit.first_seq_key: [70]}, finished={submit.first_seq_key: LENGTH}
    )
    assert [event async for event in live]
    assert router.scheduler.submits.empty(), "it was not submitted again"


async def test_a_scheduler_that_hangs_on_is_left(router, monkeypatch):
    monkeypatch.setattr(silence, "LOST_AFTER_S", 2 * silence.TICK_S)
    live, submit = await start(router)
    router.scheduler.lives.clear()
    again = await router.scheduler.submits.get()
    router.scheduler.lives.set()
    submit.is_again = True
    assert again == submit
    await live.aclose()


async def test_a_scheduler_hears_that_a_router_without_requests_is_well(router):
    for _ in range(3):
        await router.scheduler.heartbeats.get()


async def test_a_scheduler_of_an_earlier_version_gets_no_new_messages(router):
    router.scheduler.wants_heartbeats = False
    await lose_scheduler(router)
    await router.scheduler.start()
    await router.ready.wait()
    router.scheduler.heartbeats = asyncio.Queue()
    router.inference.schedulers.unpin("response", "tenant")
    live, _ = await start(router)
    await live.aclose()
    await router.scheduler.cancels.get()
    assert router.scheduler.heartbeats.empty()
    assert router.scheduler.unpins.empty()


@pytest.fixture
def link_to(monkeypatch):
    """Opens a link to a scheduler, and records its states; it counts as lost after 2 s."""
    monkeypatch.setattr(silence, "LOST_AFTER_S", 8 * silence.TICK_S)

    def make(target, may_prepare=None):
        states = asyncio.Queue()

        class Owner:
            async def prepare(self, model):  # noqa: ARG002
                if may_prepare is not None:
                    await may_prepare.wait()

            def check_fit(self, link, model):
                pass

            def connected(self, link):  # noqa: ARG002
                states.put_nowait("connected")

            def changed(self, link):
                states.put_nowait(link.status)

        return SchedulerLink(target, LinkConfig(router_id="r", max_message_mb=4), Owner()), states

    return make


async def test_a_scheduler_that_hangs_before_its_welcome_is_left(tmp_path, link_to):
    scheduler = FakeScheduler(tmp_path / "s")
    scheduler.knows_model.clear()
    scheduler.lives.clear()
    await scheduler.start()
    link, states = link_to(scheduler.target)
    task = asyncio.create_task(link.run())
    while "been silent" not in await states.get():
        pass
    assert not link.is_starting
    scheduler.knows_model.set()
    scheduler.lives.set()
    while await states.get() != "connected":
        pass
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await scheduler.stop()


async def test_a_scheduler_that_has_no_model_yet_is_waited_for(tmp_path, link_to):
    scheduler = FakeScheduler(tmp_path / "s")
    scheduler.knows_model.clear()
    await scheduler.start()
    link, states = link_to(scheduler.target)
    task = asyncio.create_task(link.run())
    # two calls a second, so for longer than the limit for a hung scheduler
    while scheduler.num_load_calls < 6:
        scheduler.asked.clear()
        await scheduler.asked.wait()
    scheduler.knows_model.set()
    while (state := await states.get()) != "connected":
        assert "been silent" not in state
    assert scheduler.routers.qsize() == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await scheduler.stop()


async def test_a_scheduler_whose_model_takes_long_to_prepare_is_not_lost(tmp_path, link_to):
    scheduler = FakeScheduler(tmp_path / "s")
    await scheduler.start()
    may_prepare = asyncio.Event()
    link, states = link_to(scheduler.target, may_prepare)
    task = asyncio.create_task(link.run())
    while scheduler.num_load_calls < 6:  # as above
        scheduler.asked.clear()
        await scheduler.asked.wait()
    may_prepare.set()
    while (state := await states.get()) != "connected":
        assert "been silent" not in state
    assert scheduler.routers.qsize() == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await scheduler.stop()
