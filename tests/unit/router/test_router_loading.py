"""Operators unload and load models through a router; clients wait or get errors."""

import asyncio
import json
import threading
from dataclasses import dataclass

import pytest
import tokenizers as hf_tokenizers
from router_fake_scheduler import FakeScheduler

from contract.errors import (
    FailedPreconditionError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from contract.outputs import FinishReason, OutputFinished
from contract.request import GenerateRequest
from router.operators.adapters_and_models import Operations
from router.request.cells import Cells
from router.request.inference import Inference
from router.request.shared_admission import SharedAdmission
from router.schedulers import loading as loading_module
from router.schedulers.link import LinkConfig
from router.schedulers.pool import Schedulers
from router.text import tokenizer as tokenizers_module
from router.text.tokenizer import Tokenizers, load_tokenizer
from rpc.health import Health
from rpc.peers.discovery import Discovery
from rpc.security.operators import Operators

pytestmark = pytest.mark.timeout(60)

PEER = "unix:"


def operated(schedulers, check_operator=None):
    operators = Operators(check_operator, has_client_certificates=False, obeys_loopback=False)
    shared = SharedAdmission(9)
    cell = Inference("tiny", schedulers._tokenizers, schedulers, shared, tokenizer_threads=1)
    return Operations(Cells([cell], shared), operators)


async def reconnect(router):
    """Reconnect the scheduler with its present state."""
    await router.scheduler.stop()
    lost = asyncio.Event()
    router.health.on_change(lambda: None if router.health.ready else lost.set())
    if router.health.ready:
        await lost.wait()
    await router.scheduler.start()
    await router.ready.wait()


@pytest.fixture
def other_dir(tmp_path):
    """A model whose tokenizer is another: each letter is a token."""
    letters = {letter: 100 + place for place, letter in enumerate("abcdefg")}
    model = hf_tokenizers.models.WordLevel({**letters, "[UNK]": 99}, unk_token="[UNK]")
    tokenizer = hf_tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = hf_tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = hf_tokenizers.decoders.Fuse()
    directory = tmp_path / "letters"
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({}))
    return directory


async def test_all_workers_are_unloaded_and_loaded(router):
    loading = operated(router.inference.schedulers)
    (worker,) = await loading.unload_models("", PEER)
    assert (worker.worker, worker.was_unloaded) == ("w", False)
    told = [each async for each in loading.load_models("w", "/models/b", PEER)]
    assert [(each.status, each.is_done) for each in told] == [
        ("loading weights", False),
        ("", True),
    ]
    assert router.scheduler.loading.directory == "/models/b"


async def test_a_schedulers_refusal_is_reported(router):
    loading = operated(router.inference.schedulers)
    with pytest.raises(NotFoundError, match="worker 'x' is unknown"):
        await loading.unload_models("x", PEER)
    with pytest.raises(NotFoundError, match="worker 'x' is unknown"):
        [each async for each in loading.load_models("x", "", PEER)]
    with pytest.raises(FailedPreconditionError, match="there is no memory"):
        [each async for each in loading.load_models("", "/nothing", PEER)]


async def test_only_operators_may(router):
    def refuse():
        raise PermissionDeniedError("a tenant's key")

    schedulers = router.inference.schedulers
    for loading, peer in (
        (operated(schedulers), "ipv4:127.0.0.1:4711"),
        (operated(schedulers, refuse), PEER),
    ):
        with pytest.raises(PermissionDeniedError):
            await loading.unload_models("", peer)
        with pytest.raises(PermissionDeniedError):
            [each async for each in loading.load_models("", "", peer)]
    assert not router.scheduler.loading.is_unloaded


@dataclass
class Pair:
    schedulers: Schedulers
    fakes: list
    changed: asyncio.Event

    async def wait_for(self, num_connected):
        while len(self.schedulers._connected) != num_connected:
            self.changed.clear()
            await self.changed.wait()


@pytest.fixture
async def pair(model_dir, tmp_path):
    fakes = [FakeScheduler(tmp_path / name) for name in "ab"]
    for fake in fakes:
        await fake.start()
    health = Health()
    changed = asyncio.Event()
    health.on_change(changed.set)
    schedulers = Schedulers(
        Discovery([fake.target for fake in fakes]),
        LinkConfig(router_id="test", max_message_mb=4),
        tokenizers=Tokenizers(load_tokenizer(model_dir)),
        health=health,
    )
    task = asyncio.create_task(schedulers.run())
    pair = Pair(schedulers, fakes, changed)
    await pair.wait_for(2)
    yield pair
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for fake in fakes:
        await fake.stop()


async def test_with_several_schedulers_the_one_with_the_worker_acts(pair):
    loading = operated(pair.schedulers)
    assert len(await loading.unload_models("", PEER)) == 2
    assert len([each async for each in loading.load_models("", "", PEER) if each.is_done]) == 2


@pytest.mark.parametrize("num_restarted", [1, 2])
async def test_a_scheduler_that_has_only_workers_without_a_model_is_asked_too(pair, num_restarted):
    loading = operated(pair.schedulers)
    await loading.unload_models("", PEER)
    for fake in pair.fakes[:num_restarted]:
        await fake.stop()
        fake.knows_model.clear()  # no welcome before a worker is attached
        await fake.start()
    await pair.wait_for(2 - num_restarted)
    assert [each.was_unloaded for each in await loading.unload_models("", PEER)] == [True, True]
    with pytest.raises(NotFoundError):
        await loading.unload_models("x", PEER)
    with pytest.raises(FailedPreconditionError, match="there is no memory"):
        [each async for each in loading.load_models("", "/nothing", PEER)]
    assert len([each async for each in loading.load_models("", "/b", PEER) if each.is_done]) == 2
    assert [fake.loading.directory for fake in pair.fakes] == ["/b", "/b"]


async def test_one_present_scheduler_makes_up_for_absent_ones(pair):
    loading = operated(pair.schedulers)
    await pair.fakes[0].stop()
    await pair.wait_for(1)
    assert len(await loading.unload_models("", PEER)) == 1
    assert len([each async for each in loading.load_models("", "", PEER) if each.is_done]) == 1
    with pytest.raises(NotFoundError, match="worker 'x' is unknown"):
        await loading.unload_models("x", PEER)
    await pair.fakes[1].stop()
    await pair.wait_for(0)
    with pytest.raises(UnavailableError):
        await loading.unload_models("", PEER)
    with pytest.raises(UnavailableError):
        [each async for each in loading.load_models("", "", PEER)]


async def test_a_scheduler_that_does_not_answer_is_named(pair, monkeypatch):
    monkeypatch.setattr(loading_module, "_UNLOAD_S", 0.2)
    loading = operated(pair.schedulers)
    pair.fakes[0].loading.may_unload.clear()
    problem = f"{pair.fakes[0].target} did not answer within 0.2 s; it may still unload the model"
    with pytest.raises(UnavailableError, match=problem):
        await loading.unload_models("", PEER)
    assert pair.fakes[1].loading.is_unloaded


async def test_another_model_has_its_own_name_and_tokenizer(router, other_dir):
    live = await router.inference.generate(GenerateRequest(prompt=(5, 6, 7)))
    await router.scheduler.submits.get()
    router.scheduler.model_id, router.scheduler.model_directory = "letters", str(other_dir)
    await reconnect(router)
    (end,) = [event async for event in live if isinstance(event, OutputFinished)]
    assert end.finish_reason is FinishReason.ERROR
    assert end.error.message == "the service now has another model"
    assert [info.id for info in router.inference.model.infos()] == ["letters"]
    assert router.tokens("bad") == [101, 100, 103]
    live = await router.inference.generate(GenerateRequest(prompt="bad", model="letters"))
    submit = await router.scheduler.submits.get()
    assert submit.prompt_token_ids[::4] == bytes([101, 100, 103])
    assert live.model == "letters"
    await live.aclose()
    with pytest.raises(NotFoundError, match="model 'tiny' is not served; 'letters' is"):
        await router.inference.generate(GenerateRequest(prompt="bad", model="tiny"))
    router.scheduler.model_id, router.scheduler.model_directory = "weights", ""
    await reconnect(router)
    assert [info.id for info in router.inference.model.infos()] == ["tiny"]
    assert router.tokens("bad") != [101, 100, 103]


def no_tokenizer(directory):
    (directory / "tokenizer.json").unlink()


def half_a_tokenizer(directory):
    path = directory / "tokenizer.json"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def no_template(directory):
    (directory / "chat_template.jinja").write_text("{% for m in messages %}")


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (no_tokenizer, "has no tokenizer.json"),
        (half_a_tokenizer, "EOF while parsing"),
        (no_template, "Unexpected end of template"),
    ],
)
async def test_a_model_whose_tokenizer_cannot_be_read_is_not_served(
    router, other_dir, spoil, problem
):
    spoil(other_dir)
    router.scheduler.model_id, router.scheduler.model_directory = "x", str(other_dir)
    not_ready = asyncio.Event()
    await router.scheduler.stop()
    await router.scheduler.start()
    router.health.on_change(lambda: not_ready.set() if problem in router.health.status else None)
    if problem not in router.health.status:
        await not_ready.wait()
    with pytest.raises(UnavailableError, match="has no tokenizer that this router can read"):
        router.inference.schedulers.reserve_seq_keys(1)


async def test_requests_prepared_for_the_old_model_are_not_submitted(
    router, other_dir, monkeypatch
):
    text = router.inference.text
    prepare = text.prepare

    async def prepare_late(request):
        prepared = await prepare(request)
        router.scheduler.model_id, router.scheduler.model_directory = "letters", str(other_dir)
        await reconnect(router)
        return prepared

    monkeypatch.setattr(text, "prepare", prepare_late)
    with pytest.raises(UnavailableError, match="the service now has another model"):
        await router.inference.generate(GenerateRequest(prompt="bad"))
    assert router.scheduler.submits.empty()


async def test_a_second_request_for_a_tokenizer_joins_the_first_read(
    model_dir, other_dir, monkeypatch
):
    begins, may_end = threading.Event(), threading.Event()
    directories = []

    def read_slowly(directory):
        directories.append(directory)
        begins.set()
        assert may_end.wait(30)
        return load_tokenizer(directory)

    monkeypatch.setattr(tokenizers_module, "load_tokenizer", read_slowly)
    tokenizers = Tokenizers(load_tokenizer(model_dir))
    impatient = asyncio.create_task(tokenizers.read(str(other_dir)))
    await asyncio.to_thread(begins.wait)
    impatient.cancel()
    await asyncio.gather(impatient, return_exceptions=True)
    again = [asyncio.create_task(tokenizers.read(str(other_dir))) for _ in range(2)]
    may_end.set()
    await asyncio.gather(*again)
    tokenizers.use(str(other_dir))
    assert tokenizers.current.encode("bad") == [101, 100, 103]
    assert directories == [other_dir]


async def test_a_tokenizer_that_could_not_be_read_is_read_again(model_dir, other_dir):
    text = (other_dir / "tokenizer.json").read_text()
    (other_dir / "tokenizer.json").write_text(text[:100])
    tokenizers = Tokenizers(load_tokenizer(model_dir))
    with pytest.raises(Exception, match="EOF while parsing"):
        await tokenizers.read(str(other_dir))
    (other_dir / "tokenizer.json").write_text(text)
    await tokenizers.read(str(other_dir))
    assert tokenizers.num_token_ids(str(other_dir)) == 107
