"""LoRA adapters at the router: clients name one as a model; the scheduler gets it as a field."""

import asyncio

import grpc
import pytest
from router_fake_scheduler import LENGTH

from contract.errors import InvalidArgumentError, NotFoundError, PermissionDeniedError
from contract.outputs import FinishReason, OutputFinished
from contract.request import GenerateRequest
from router.operators.adapters_and_models import Operations
from rpc.security.operators import Operators

pytestmark = pytest.mark.timeout(120)


async def reconnect(router, *adapters):
    """Reconnect the scheduler with these adapters."""
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


async def test_a_submit_has_the_adapter_that_the_model_names(router):
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


async def test_an_unknown_name_is_not_found_and_the_error_lists_the_names(router):
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
    assert [end.finish_reason for end in ends] == [FinishReason.LENGTH]
    await adapted.aclose()


def names(inference):
    return [info.id for info in inference.model.infos()]


async def next_infos(router):
    """The listed models, after the next change from the scheduler."""
    await router.inference.schedulers.model_change()
    return names(router.inference)


async def test_adapters_come_and_go_as_the_scheduler_tells(router):
    changed = asyncio.create_task(next_infos(router))
    await asyncio.sleep(0)
    await router.scheduler.send_adapters("a", "b")
    assert await changed == ["tiny", "a", "b"]
    live, submit = await start(router, "b")
    assert submit.sampling.adapter.digest == b"b" * 32
    changed = asyncio.create_task(next_infos(router))
    await asyncio.sleep(0)
    await router.scheduler.send_adapters("a")
    assert await changed == ["tiny", "a"]
    with pytest.raises(NotFoundError, match="model 'b' is not served"):
        await start(router, "b")
    # A running request continues, and its text arrives.
    key = submit.first_seq_key
    await router.scheduler.step({key: [5]}, finished={key: LENGTH})
    ends = [event async for event in live if isinstance(event, OutputFinished)]
    assert [end.finish_reason for end in ends] == [FinishReason.LENGTH]
    assert router.inference.text.token_text(70)


def operated(router, check_operator=None):
    operators = Operators(check_operator, has_client_certificates=False, obeys_loopback=False)
    return Operations(router.cells, operators)


async def test_what_is_loaded_is_listed_when_the_call_returns(router):
    operations = operated(router)
    loaded = await operations.load_adapter("a", "/adapters/a", "unix:")
    assert (loaded.adapter.name, loaded.was_there) == ("a", False)
    assert names(router.inference) == ["tiny", "a"]
    assert (await operations.load_adapter("a", "/adapters/a", "unix:")).was_there
    assert [each.adapter.name for each in await operations.list_adapters("unix:")] == ["a"]
    await operations.unload_adapter("a", "unix:")
    assert names(router.inference) == ["tiny"]
    assert await operations.list_adapters("unix:") == []
    with pytest.raises(NotFoundError, match="'a' is not loaded"):
        await operations.unload_adapter("a", "unix:")


async def test_an_unload_returns_once_it_is_announced_so_that_a_load_waits_for_its_own(router):
    operations = operated(router)
    await operations.load_adapter("a", "/adapters/a", "unix:")
    router.scheduler.may_announce.clear()
    unloading = asyncio.create_task(operations.unload_adapter("a", "unix:"))
    await router.scheduler.unloaded.wait()
    assert names(router.inference) == ["tiny", "a"]
    router.scheduler.may_announce.set()
    await unloading
    assert names(router.inference) == ["tiny"]


async def test_an_adapter_cannot_have_the_models_name(router):
    with pytest.raises(
        InvalidArgumentError, match="name is 'tiny', which is the name of the model"
    ):
        await operated(router).load_adapter("tiny", "/adapters/a", "unix:")
    assert router.scheduler.adapters == ()


async def test_only_operators_may(router):
    def refuse():
        raise PermissionDeniedError("a tenant's key")

    for operations, peer, problem in (
        (operated(router), "ipv4:127.0.0.1:4711", "on its Unix socket or, with --local-drain"),
        (operated(router, refuse), "unix:", "a tenant's key"),
    ):
        for call in (
            operations.load_adapter("a", "/adapters/a", peer),
            operations.unload_adapter("a", peer),
            operations.list_adapters(peer),
        ):
            with pytest.raises(PermissionDeniedError, match=problem):
                await call
    assert router.scheduler.adapters == ()
