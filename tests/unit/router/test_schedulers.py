"""Several schedulers behind one router: the choice for a request, and for its next attempt."""

import asyncio
import contextlib
from collections import Counter

import grpc
import pytest
from router_fake_scheduler import LENGTH, FakeScheduler

from contract.errors import InvalidArgumentError, NotFoundError, TooBusyError, UnavailableError
from contract.outputs import OutputDelta
from contract.request import GenerateRequest, ResumeRequest
from quire.v1 import kv_pb2
from router.operators.adapters_and_models import Operations
from router.request.cells import Cells
from router.request.inference import Inference
from router.request.shared_admission import SharedAdmission
from router.schedulers import link as link_module
from router.schedulers import pool as schedulers_module
from router.schedulers.link import LinkConfig
from router.schedulers.pool import Schedulers
from router.text.tokenizer import Tokenizers, load_tokenizer
from rpc.health import Health
from rpc.peers.discovery import Discovery
from rpc.security.operators import Operators

pytestmark = pytest.mark.timeout(120)


class FakeResolver:
    def __init__(self, *targets):
        self.targets = list(targets)

    async def resolve(self, host, port):  # noqa: ARG002
        return self.targets


class Pool:
    """A router whose schedulers a test starts and stops."""

    def __init__(self, model_dir, discovery):
        self.health = Health()
        self._changed = asyncio.Event()
        self.health.on_change(self._changed.set)
        tokenizers = Tokenizers(load_tokenizer(model_dir))
        self.schedulers = Schedulers(
            discovery,
            LinkConfig(router_id="test", max_message_mb=4),
            tokenizers=tokenizers,
            health=self.health,
        )
        shared = SharedAdmission(99)
        self.inference = Inference("tiny", tokenizers, self.schedulers, shared, tokenizer_threads=1)
        self.cells = Cells([self.inference], shared)

    async def wait_for(self, num_connected, num_known=None):
        while (
            len(self.schedulers._connected) != num_connected
            or len(self.schedulers._links) != (num_known or len(self.schedulers._links))
        ):  # fmt: skip
            self._changed.clear()
            await self._changed.wait()

    async def start(self, prompt, **options):
        return await self.inference.generate(GenerateRequest(prompt=prompt, **options))


@contextlib.asynccontextmanager
async def running(model_dir, discovery):
    pool = Pool(model_dir, discovery)
    task = asyncio.create_task(pool.schedulers.run())
    try:
        yield pool
    finally:
        pool.inference.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled(), "it broke"


@pytest.fixture
async def pair(tmp_path):
    fakes = [FakeScheduler(tmp_path / name) for name in "ab"]
    yield fakes
    for fake in fakes:
        if fake._server is not None:
            await fake.stop()


@pytest.fixture
async def pool(model_dir, pair):
    for fake in pair:
        await fake.start()
    async with running(model_dir, Discovery([fake.target for fake in pair])) as pool:
        await pool.wait_for(2)
        yield pool


async def place(pool, pair, prompt, **options):
    """Starts a request; returns it, its message, its scheduler, and the other scheduler."""
    live = await pool.start(prompt, **options)
    gets = {asyncio.create_task(fake.submits.get()): fake for fake in pair}
    (got,), others = await asyncio.wait(gets, return_when=asyncio.FIRST_COMPLETED)
    for other in others:
        other.cancel()
    home = gets[got]
    return live, got.result(), home, next(fake for fake in pair if fake is not home)


async def test_prompts_with_one_beginning_meet_and_others_spread(pool, pair):
    homes = Counter()
    for first in range(16):
        lives = []
        for last in range(2):
            live, _, home, _ = await place(pool, pair, (*[first + 5] * 64, last + 5)[:50])
            lives.append((live, home))
        assert lives[0][1] is lives[1][1]
        homes[lives[0][1].target] += 1
        for live, _ in lives:
            await live.aclose()
    assert len(homes) == 2


async def test_requests_of_a_scheduler_that_stays_away_move_to_another(pool, pair, monkeypatch):
    monkeypatch.setattr(schedulers_module, "_RETURN_S", 0.01)
    live, submit, home, other = await place(pool, pair, (5, 6, 7))
    key = submit.first_seq_key
    await home.step({key: [70]})
    assert isinstance(await anext(live), OutputDelta)
    await home.stop()
    again = await other.submits.get()
    assert again.first_seq_key == key
    assert len(again.outputs[0].token_ids) == 4
    await other.step({key: [71]}, finished={key: LENGTH})
    delta, _, _ = [event async for event in live]
    assert (delta.token_offset, delta.token_ids) == (1, (71,))


async def test_a_scheduler_that_returns_has_its_requests_again(pool, pair, monkeypatch):
    monkeypatch.setattr(schedulers_module, "_RETURN_S", 60.0)
    live, submit, home, other = await place(pool, pair, (5, 6, 7))
    await home.stop()
    await pool.wait_for(1)
    await home.start()
    submit.is_again = True
    assert await home.submits.get() == submit
    assert other.submits.empty()
    await live.aclose()


async def test_a_standby_gets_the_live_requests(model_dir, pair):
    one, standby = pair
    await one.start()
    async with running(model_dir, Discovery([fake.target for fake in pair])) as pool:
        await pool.wait_for(1)
        live = await pool.start((5, 6, 7))
        submit = await one.submits.get()
        await one.stop()
        await pool.wait_for(0)
        assert not pool.health.ready
        with pytest.raises(UnavailableError):
            await pool.start((8,))
        await standby.start()
        submit.is_again = True
        assert await standby.submits.get() == submit
        assert pool.health.ready
        await live.aclose()
        assert await standby.cancels.get() == [submit.first_seq_key]


async def test_the_new_owner_of_the_workers_gets_the_hung_schedulers_requests(
    model_dir, pair, monkeypatch
):
    """At once, although the hung scheduler keeps its stream; even after a long search."""
    monkeypatch.setattr(link_module, "_MAX_BACKOFF_S", 3600.0)
    monkeypatch.setattr(link_module, "_MIN_BACKOFF_S", 3600.0)
    monkeypatch.setattr(schedulers_module, "_RETURN_S", 3600.0)
    hangs, standby = pair
    await hangs.start()
    async with running(model_dir, Discovery([fake.target for fake in pair])) as pool:
        await pool.wait_for(1)
        live = await pool.start((5, 6, 7))
        submit = await hangs.submits.get()
        standby.superseded_epochs = (hangs.epoch,)
        await standby.start()
        hangs.lives.clear()
        submit.is_again = True
        assert await standby.submits.get() == submit
        assert hangs.submits.empty()
        await pool.wait_for(1)
        await live.aclose()
        assert await standby.cancels.get() == [submit.first_seq_key]
        hangs.lives.set()


async def test_schedulers_come_and_go_with_dns(model_dir, pair):
    one, other = pair
    for fake in pair:
        await fake.start()
    resolver = FakeResolver(one.target)
    discovery = Discovery(["dns:scheduler:50052"], resolver=resolver, interval_s=0.01)
    async with running(model_dir, discovery) as pool:
        await pool.wait_for(1)
        resolver.targets[:] = [other.target]
        await pool.wait_for(2)  # a scheduler that is missing only in DNS continues
        await one.stop()
        await pool.wait_for(1, num_known=1)
        live = await pool.start((5, 6, 7))
        await other.submits.get()
        await live.aclose()


async def test_a_request_is_resumed_wherever_it_is(pool, pair):
    options = {"request_id": "r", "resumable": True}
    live, submit, home, other = await place(pool, pair, (5, 6, 7), **options)
    await live.aclose()
    await home.leaves.get()
    request = ResumeRequest("r", "", {}, has_prompt_scores=False, deadline=None)
    resuming = asyncio.create_task(pool.cells.resume(request))

    async def answer(fake):
        key = (await fake.resumes.get()).first_seq_key
        if fake is other:
            await fake.refuse(key, NotFoundError.code, "unknown")
        else:
            await fake.resumed(submit, key)

    answers = [asyncio.create_task(answer(fake)) for fake in (home, other)]
    resumed = await resuming
    await resumed.aclose()
    for task in answers:
        task.cancel()


async def wait_until_received(fake, live, submit):
    """Waits until the router has received this scheduler's earlier messages."""
    await fake.step({submit.first_seq_key: [70]})
    assert isinstance(await anext(live), OutputDelta)


async def test_a_request_that_a_scheduler_refuses_is_offered_once_to_each_other(pool, pair):
    full = grpc.StatusCode.RESOURCE_EXHAUSTED
    live, submit, home, other = await place(pool, pair, (5, 6, 7), n=2)
    await home.refuse(submit.first_seq_key, full, "the queue is full")
    assert await other.submits.get() == submit
    await wait_until_received(other, live, submit)
    await live.aclose()
    live, submit, home, other = await place(pool, pair, (5, 6, 7))
    await home.refuse(submit.first_seq_key, full, "the queue is full")
    await other.submits.get()
    await other.refuse(submit.first_seq_key, full, "the queue is full here too", 0.25)
    with pytest.raises(TooBusyError, match="here too") as refused:
        await anext(live)
    assert refused.value.retry_after_s == 0.25
    assert home.submits.empty()


async def test_a_scheduler_that_is_known_to_be_full_is_left_out(pool, pair):
    live, submit, home, other = await place(pool, pair, (5, 6, 7))
    await home.send_room(1)
    await wait_until_received(home, live, submit)
    for expected, n in ((other, 2), (home, 1), (other, 1)):  # the router counts its room
        each, _, got, _ = await place(pool, pair, (5, 6, 7), n=n)
        assert got is expected
        await each.aclose()
    await home.send_room()
    await wait_until_received(home, live, submit)
    each, _, got, _ = await place(pool, pair, (5, 6, 7))
    assert got is home
    await each.aclose()
    await live.aclose()


async def test_an_unloaded_scheduler_gets_only_requests_that_no_other_can_serve(pool, pair):
    live, submit, home, other = await place(pool, pair, (5, 6, 7))
    for is_unloaded, expected in ((True, other), (False, home)):
        await home.send_unloaded(is_unloaded)
        await wait_until_received(home, live, submit)
        each, _, got, _ = await place(pool, pair, (5, 6, 7))
        assert got is expected
        await each.aclose()
    await live.aclose()
    live, submit, home, other = await place(pool, pair, (5, 6, 7))
    await home.send_unloaded(is_unloaded=True)
    await wait_until_received(home, live, submit)
    await other.stop()
    await pool.wait_for(1)
    each = await pool.start((5, 6, 7))
    await home.submits.get()
    await each.aclose()
    await live.aclose()


async def test_requests_may_be_as_long_as_all_schedulers_now_take(pool, pair):
    homes = {}
    for first in range(5, 40):  # until each scheduler has a request
        live, submit, home, _ = await place(pool, pair, (first, 6, 7))
        homes.setdefault(home, (live, submit))
    assert pool.inference.model.info().max_model_len == 64
    for fake, told, expected in zip(
        (*homes, *homes), (100, 90, 32, 90), (64, 90, 32, 32), strict=True
    ):
        await fake.send_max_model_len(told)
        await wait_until_received(fake, *homes[fake])
        assert pool.inference.model.info().max_model_len == expected


async def test_an_unknown_request_is_not_found(pool, pair):
    request = ResumeRequest("r", "", {}, has_prompt_scores=False, deadline=None)
    resuming = asyncio.create_task(pool.cells.resume(request))
    for fake in pair:
        asked = await fake.resumes.get()
        await fake.refuse(asked.first_seq_key, NotFoundError.code, "unknown")
    with pytest.raises(NotFoundError, match="unknown"):
        await resuming


async def test_loads_are_added_up_and_workers_of_all_are_described(pool, pair):
    for fake in pair:
        fake.load.fragmentation = 0.25
        fake.load.block_size = 16
    load = await pool.cells.load()
    assert (load.num_blocks, load.num_workers) == (14, 2)
    assert (load.block_size, load.fragmentation) == (16, 0.25)
    assert len(await pool.cells.describe_kv(kv_pb2.KvQuery())) == 2
    with pytest.raises(NotFoundError, match="nowhere"):
        await pool.cells.describe_kv(kv_pb2.KvQuery(worker="nowhere"))


async def test_a_scheduler_with_another_model_than_the_others_is_left_out(model_dir, pair):
    one, other = pair
    other.model_id = "others"
    await one.start()
    async with running(model_dir, Discovery([fake.target for fake in pair])) as pool:
        await pool.wait_for(1)
        await other.start()
        await other.routers.get()
        await other.routers.get()  # the router asks again and again
        assert len(pool.schedulers._connected) == 1
        live = await pool.start((5, 6, 7))
        await one.submits.get()
        await live.aclose()


async def test_a_request_goes_where_its_adapter_is(model_dir, pair):
    _, other = pair
    other.adapters = ("a",)
    for fake in pair:
        await fake.start()
    async with running(model_dir, Discovery([fake.target for fake in pair])) as pool:
        await pool.wait_for(2)
        assert [info.id for info in pool.inference.model.infos()] == ["tiny", "a"]
        for first in range(8):
            live, submit, home, _ = await place(pool, pair, [first + 5] * 8, model="a")
            assert home is other
            assert submit.sampling.adapter.name == "a"
            await live.aclose()


def operated(pool):
    operators = Operators(None, has_client_certificates=False, obeys_loopback=False)
    return Operations(pool.cells, operators)


async def test_what_one_refuses_the_others_unload_even_if_the_caller_leaves(pool, pair):
    adapters = operated(pool)
    pair[1].bad_directory = "/bad"
    pair[1].may_load.clear()
    loading = asyncio.create_task(adapters.load_adapter("a", "/bad", "unix:"))
    assert await pair[0].changes.get() == ("a",)
    loading.cancel()
    await asyncio.wait([loading])
    pair[1].may_load.set()
    assert await pair[0].changes.get() == ()


async def test_nothing_changes_while_a_scheduler_may_be_back_soon(pool, pair, monkeypatch):
    adapters = operated(pool)
    await adapters.load_adapter("a", "/adapters/a", "unix:")
    await pair[1].stop()
    await pool.wait_for(1)
    for change in (
        adapters.load_adapter("b", "/adapters/b", "unix:"),
        adapters.unload_adapter("a", "unix:"),
    ):
        with pytest.raises(UnavailableError, match=f"scheduler at {pair[1].target} has not been"):
            await change
    assert pair[0].adapters == ("a",)
    assert [each.adapter.name for each in await adapters.list_adapters("unix:")] == ["a"]
    monkeypatch.setattr(schedulers_module, "_AWAY_S", 0.0)  # it accepts no stream, like a standby
    await adapters.unload_adapter("a", "unix:")
    assert pair[0].adapters == ()
    monkeypatch.undo()
    await pair[1].start()
    await pool.wait_for(2)
    await adapters.unload_adapter("a", "unix:")
    assert pair[1].adapters == ()


async def test_all_schedulers_load_an_adapter_or_none(pool, pair):
    adapters = operated(pool)
    pair[1].bad_directory = "/bad"
    with pytest.raises(InvalidArgumentError, match="directory is bad"):
        await adapters.load_adapter("a", "/bad", "unix:")
    assert [fake.adapters for fake in pair] == [(), ()]
    await adapters.load_adapter("a", "/adapters/a", "unix:")
    assert [fake.adapters for fake in pair] == [("a",), ("a",)]
    await pair[0].send_adapters()
    await adapters.unload_adapter("a", "unix:")  # one scheduler does not have the adapter
    assert [fake.adapters for fake in pair] == [(), ()]
