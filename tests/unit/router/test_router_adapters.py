"""LoRA adapters at the router: each is a model of its own to clients, a field to the scheduler."""

import asyncio

import grpc
import pytest
from router_fake_scheduler import LENGTH

from router.domain import FinishReason, GenerateRequest, OutputFinished
from rpc.errors import NotFoundError

pytestmark = pytest.mark.timeout(20)


async def reconnect(router, *adapters):
    """Has the scheduler come back with these."""
    lost = asyncio.Event()
    router.health.on_change(lambda: None if router.health.ready else lost.set())
    await router.scheduler.stop()
    await lost.wait()
    router.scheduler.adapters = adapters
    await router.scheduler.start()
    await router.ready.wait()


async def start(router, model):
    live = await router.inference.generate(GenerateRequest(prompt=(5, 6, 7), model=model))
    return live, await router.scheduler.submits.get()


async def test_a_scheduler_is_told_of_the_adapter_that_the_model_names(router):
    await reconnect(router, "a", "b")
    for model, name in (("", ""), ("tiny", ""), ("b", "b")):
        live, submit = await start(router, model)
        assert live.model == (name or "tiny")
        assert submit.sampling.HasField("adapter") == bool(name)
        assert submit.sampling.adapter.name == name
        assert submit.sampling.adapter.digest == name.encode() * 32
        await live.aclose()


async def test_adapters_are_listed_behind_the_model_they_belong_to(router):
    await reconnect(router, "a", "b")
    infos = router.inference.model.infos()
    assert [(info.id, info.parent) for info in infos] == [
        ("tiny", ""),
        ("a", "tiny"),
        ("b", "tiny"),
    ]
    assert len({info.max_model_len for info in infos}) == 1


async def test_an_adapter_called_as_the_model_is_not_served(router):
    await reconnect(router, "tiny")
    assert [info.id for info in router.inference.model.infos()] == ["tiny"]
    live, submit = await start(router, "tiny")
    assert not submit.sampling.HasField("adapter")
    await live.aclose()


async def test_an_unknown_name_is_not_found_and_told_what_there_is(router):
    await reconnect(router, "a")
    with pytest.raises(NotFoundError, match="model 'c' is not served; 'tiny', 'a' are"):
        await router.inference.generate(GenerateRequest(prompt="x", model="c"))


async def test_a_request_is_submitted_again_with_its_adapter_and_others_go_on_without(router):
    await reconnect(router, "a", "b")
    lives = [await start(router, model) for model in ("tiny", "a")]
    await reconnect(router, "b")
    again = [await router.scheduler.submits.get() for _ in lives]
    assert [message.sampling.adapter.name for message in again] == ["", "a"]
    (plain, _), (adapted, submit) = lives
    await router.scheduler.refuse(submit.first_seq_key, grpc.StatusCode.NOT_FOUND, "gone")
    with pytest.raises(NotFoundError, match="gone"):
        await anext(adapted)
    await router.scheduler.step({again[0].first_seq_key: [5]})
    await router.scheduler.step(finished={again[0].first_seq_key: LENGTH})
    ends = [event async for event in plain if isinstance(event, OutputFinished)]
    assert [end.reason for end in ends] == [FinishReason.LENGTH]
    await adapted.aclose()
