"""Models that share a device: a router loads a requested one in place of another."""

import asyncio
import contextlib
import itertools
import json
import time
import uuid

import aiohttp
import grpc
import openai
import pytest
from aiohttp import web
from router_fake_scheduler import LENGTH, FakeScheduler

from contract.errors import TooBusyError, UnavailableError
from contract.request import GenerateRequest
from contract.sampling import SamplingParams
from quire.v1 import loading_pb2, loading_pb2_grpc
from router.http.answers import sse, streaming
from router.http.api import routes
from router.http.batches.lines import KIND, BatchLines, turn_of_line
from router.http.batches.store import Batch
from router.live.usage import UsageCounts
from router.request.cells import Cells
from router.request.inference import Inference
from router.request.on_demand import OnDemand
from router.request.shared_admission import SharedAdmission
from router.schedulers.link import LinkConfig
from router.schedulers.pool import Schedulers
from router.stored_turns.database import open_database
from router.stored_turns.store import TurnStore, insert_turn
from router.stored_turns.turns import Turns
from router.text.tokenizer import Tokenizers, load_tokenizer
from rpc.health import Health
from rpc.peers.discovery import Discovery

pytestmark = pytest.mark.timeout(60)


class Device:
    """The loaded model, at most one, and the models loaded before."""

    def __init__(self):
        self.loaded = set()
        self.history = []
        self.broken = set()
        """Models that cannot be loaded."""
        self.num_kept = None
        """How often a model was not unloaded; None: it is."""
        self.is_torn = False
        """Whether the next unload reaches only one of two workers."""


class FakeLoading(loading_pb2_grpc.LoadingServiceServicer):
    def __init__(self, scheduler, device, name):
        self.scheduler, self.device, self.name = scheduler, device, name

    async def Unload(self, request, context):  # noqa: N802, ARG002
        if self.device.num_kept is not None:
            self.device.num_kept += 1
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "it is on several devices")
        if self.device.is_torn:
            self.device.is_torn = False
            self.scheduler.load.num_workers = self.scheduler.load.num_unloaded_workers = 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "one worker is away")
        self.device.loaded.discard(self.name)
        self.scheduler.load.num_workers, self.scheduler.load.num_unloaded_workers = 0, 1
        await self.scheduler.send_unloaded(True)
        return loading_pb2.UnloadResponse(workers=[loading_pb2.UnloadedWorker(worker="w")])

    async def Load(self, request, context):  # noqa: N802, ARG002
        assert self.device.loaded <= {self.name}, "another model has the device"
        if self.name in self.device.broken:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "its files are broken")
        self.device.loaded.add(self.name)
        self.device.history.append(self.name)
        self.scheduler.load.num_workers, self.scheduler.load.num_unloaded_workers = 1, 0
        if self.scheduler.knows_model.is_set():
            await self.scheduler.send_unloaded(False)
        self.scheduler.knows_model.set()
        yield loading_pb2.LoadResponse(worker="w", is_done=True)


class Service:
    def __init__(self, cells, schedulers, device):
        self.cells, self.schedulers, self.device = cells, schedulers, device

    def ask(self, name):
        """Begin a request; returns its task."""
        request = GenerateRequest(prompt=(5, 6), model=name, sampling=SamplingParams(max_tokens=2))
        return asyncio.create_task(self.cells.generate(request))

    async def answered(self, name):
        """Make a request that its scheduler answers at once."""
        asking = self.ask(name)
        submit = await self.schedulers[name].submits.get()
        assert self.device.loaded == {name}
        await self.finish(name, submit)
        async with await asking as live:
            return [event async for event in live]

    async def finish(self, name, submit):
        key = submit.first_seq_key
        await self.schedulers[name].step({key: [70]}, finished={key: LENGTH}, admitted={key: 0})


@contextlib.asynccontextmanager
async def serving(model_dir, folder, names, **options):
    device = Device()
    schedulers, made = {}, []
    shared = SharedAdmission(options.pop("max_live_requests", 9))
    for name in names:
        scheduler = schedulers[name] = FakeScheduler(folder / name)
        scheduler.loading = FakeLoading(scheduler, device, name)
        scheduler.load.num_workers, scheduler.load.num_unloaded_workers = 0, 1
        scheduler.knows_model.clear()
        await scheduler.start()
        tokenizers = Tokenizers(load_tokenizer(model_dir))
        links = Schedulers(
            Discovery([scheduler.target]),
            LinkConfig(router_id="test", max_message_mb=4),
            tokenizers=tokenizers,
            health=Health(),
        )
        made.append(Inference(name, tokenizers, links, shared, tokenizer_threads=1))
    on_demand = OnDemand(
        made, **{"max_loaded": 1, "min_loaded_s": 0, "max_waiting": 9, "tick_s": 0.01, **options}
    )
    cells = Cells(made, shared, on_demand)
    tasks = [asyncio.create_task(cell.schedulers.run()) for cell in made]
    tasks.append(asyncio.create_task(on_demand.run()))
    try:
        yield Service(cells, schedulers, device)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
        cells.close()
        for scheduler in schedulers.values():
            scheduler.knows_model.set()
            await scheduler.stop()


async def until(condition):
    while not condition():  # noqa: ASYNC110 - several parts change it
        await asyncio.sleep(0)


async def test_the_first_model_is_loaded_without_a_request(model_dir, tmp_path):
    async with serving(model_dir, tmp_path, "ab") as service:
        await until(lambda: service.cells.all[0].schedulers.is_loaded)
        assert service.device.history == ["a"]
        assert [each.id for each in service.cells.infos()] == ["a", "b"]


async def test_a_request_loads_its_model_in_place_of_the_least_recently_used(model_dir, tmp_path):
    async with serving(model_dir, tmp_path, "abc", max_loaded=1) as service:
        for name in "abcab":
            assert await service.answered(name)
        assert service.device.history == [*"abcab"]
        assert await service.answered("b")
        assert service.device.history == [*"abcab"]  # it is loaded


async def test_running_requests_wait_for_their_model_and_are_not_lost(model_dir, tmp_path):
    async with serving(model_dir, tmp_path, "ab") as service:
        running = service.ask("a")
        submit = await service.schedulers["a"].submits.get()
        assert await service.answered("b")  # though "a" is busy
        await until(lambda: service.device.loaded == {"a"})  # its request wants it back
        await service.finish("a", submit)
        async with await running as live:
            assert [event async for event in live]
        assert service.device.history == [*"aba"]


async def test_a_model_stays_for_a_time_however_much_another_is_wanted(model_dir, tmp_path):
    async with serving(model_dir, tmp_path, "ab", min_loaded_s=3600) as service:
        await service.answered("a")
        waiting = service.ask("b")
        for _ in range(5):
            await service.answered("a")
        assert not waiting.done()
        assert service.device.history == ["a"]
        service.cells.on_demand._min_loaded_s = 0
        await service.schedulers["b"].submits.get()
        await (await waiting).aclose()


async def looked(service, times=3):
    """Waits until the router has looked for a model to load."""
    on_demand = service.cells.on_demand
    seen, look = [], on_demand._look
    on_demand._look = lambda: seen.append(1) or look()
    await until(lambda: len(seen) > times)
    on_demand._look = look


async def test_a_busy_model_makes_no_room_for_lines_of_batches_alone(model_dir, tmp_path):
    async with serving(model_dir, tmp_path, "abc") as service:
        running = service.ask("a")
        submit = await service.schedulers["a"].submits.get()
        line = asyncio.create_task(service.cells.use("b", is_patient=True))
        await looked(service)
        assert service.device.history == ["a"]
        assert await service.answered("c")  # a request that is not patient, and came later
        # its request is served before the batch's line
        await until(lambda: service.device.loaded == {"a"})
        await looked(service)
        await service.finish("a", submit)
        async with await running as live:
            assert [event async for event in live]
        assert (await line).name == "b"
        assert service.device.history == [*"acab"]


async def test_what_cannot_be_loaded_is_told_and_others_go_on(model_dir, tmp_path):
    async with serving(model_dir, tmp_path, "ab") as service:
        service.device.broken.add("b")
        await service.answered("a")
        with pytest.raises(UnavailableError, match="model 'b': its files are broken"):
            await service.ask("b")
        await service.answered("a")


async def test_no_model_makes_room_for_one_whose_scheduler_is_away(model_dir, tmp_path):
    async with serving(model_dir, tmp_path, "ab") as service:
        await service.answered("a")
        await service.schedulers["b"].stop()
        _, away = service.cells.all
        await until(lambda: not any(away.schedulers.target_to_is_connected.values()))
        with pytest.raises(UnavailableError, match="not connected"):
            await service.ask("b")
        assert service.device.history == ["a"]
        await service.schedulers["b"].start()


async def test_a_model_whose_scheduler_is_away_is_still_loaded(model_dir, tmp_path):
    async with serving(model_dir, tmp_path, "ab") as service:
        await service.answered("a")
        await service.schedulers["a"].stop()
        with pytest.raises(UnavailableError, match="schedulers of loaded models are away: 'a'"):
            await service.ask("b")
        assert service.device.history == ["a"]
        await service.schedulers["a"].start()
        await until(lambda: service.cells.all[0].schedulers.is_loaded)
        assert await service.answered("b")
        assert service.device.history == ["a", "b"]


async def test_few_calls_wait_and_none_after_a_drain(model_dir, tmp_path):
    async with serving(model_dir, tmp_path, "ab", min_loaded_s=3600, max_waiting=1) as service:
        await service.answered("a")
        waiting = service.ask("b")
        await asyncio.sleep(0)
        with pytest.raises(TooBusyError, match="1 requests wait for models"):
            await service.ask("b")
        draining = asyncio.create_task(service.cells.drain())
        for asking in (waiting, service.ask("b")):
            with pytest.raises(UnavailableError, match="draining"):
                await asking
        await draining


async def test_a_client_that_leaves_wants_nothing(model_dir, tmp_path):
    async with serving(model_dir, tmp_path, "ab", min_loaded_s=3600) as service:
        await service.answered("a")
        waiting = service.ask("b")
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        service.cells.on_demand._min_loaded_s = 0
        for _ in itertools.repeat(None, 20):
            await service.answered("a")
        assert service.device.history == ["a"]


@contextlib.asynccontextmanager
async def keeping(service, folder):
    """Let a service keep turns in a folder; yield their store, and a client."""
    store = TurnStore(open_database(str(folder / "turns.sqlite")), uuid.uuid4().hex)
    kept = {"retention_s": 60, "usage_retention_s": 60, "tick_s": 0.02}
    turns = Turns(store, service.cells, UsageCounts(), **kept)
    turns.serve(KIND, BatchLines(service.cells))
    app = web.Application()
    app.add_routes(routes(service.cells, None, max_body_bytes=2**20, turns=turns))
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    running = asyncio.create_task(turns.run())
    try:
        async with openai.AsyncOpenAI(
            base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0
        ) as client:
            yield store, client
    finally:
        await runner.cleanup()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await turns.close()


STREAMS = {
    "/completions": {"prompt": "Say", "max_tokens": 1},
    "/chat/completions": {"messages": [{"role": "user", "content": "Say"}], "max_tokens": 1},
    "/responses": {"input": "Say", "max_output_tokens": 1},
    "/messages": {"messages": [{"role": "user", "content": "Say"}], "max_tokens": 1},
}


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("is_broken", [False, True])
async def test_a_stream_has_heartbeats_while_its_model_is_loaded(
    model_dir, tmp_path, monkeypatch, path, is_broken
):
    monkeypatch.setattr(streaming, "STATUS_WITHIN_S", 0.0)
    monkeypatch.setattr(sse, "_HEARTBEAT_S", 0.01)
    body = {"model": "b", "stream": True} | STREAMS[path]
    async with serving(model_dir, tmp_path, "ab", min_loaded_s=3600) as service:
        await service.answered("a")
        if is_broken:
            service.device.broken.add("b")
        async with (
            keeping(service, tmp_path) as (_, client),
            aiohttp.ClientSession() as http,
            http.post(f"{client.base_url}{path[1:]}", json=body) as stream,
        ):
            assert stream.status == 200
            assert await stream.content.readline() == b":\n"
            service.cells.on_demand._min_loaded_s = 0
            if not is_broken:
                await service.finish("b", await service.schedulers["b"].submits.get())
            lines = (await stream.text()).splitlines()
    told = [line for line in lines if line.strip(": ")]
    if is_broken:
        assert told[0] == "event: error"
        error = json.loads(told[1].removeprefix("data: "))["error"]
        assert "its files are broken" in error["message"]
        assert len(told) == 2
    else:
        ends = {"/messages": "message_stop", "/responses": "response.incomplete"}
        assert ends.get(path, "[DONE]") in told[-1]
        begins = {"/messages": "message_start", "/responses": "response.created"}
        assert begins.get(path, "data: ") in told[0]


async def test_heartbeats_go_on_after_the_model_is_loaded(monkeypatch):
    monkeypatch.setattr(streaming, "STATUS_WITHIN_S", 3600.0)
    begun = asyncio.Event()

    class Held:
        """A stream with a sent head."""

        is_held, response, heartbeats = True, None, staticmethod(contextlib.nullcontext)

        def __init__(self):
            self.first_event = asyncio.get_running_loop().create_future()

        async def start(self, head):  # noqa: ARG002
            begun.set()

        async def end(self):
            pass

    stream = streaming.stream(Held(), begun.wait(), None, request_id="r")
    await asyncio.wait_for(stream, 30)


async def test_a_line_of_a_batch_loads_its_model(model_dir, tmp_path):
    """Its prompt depends on limits that the router knows only after the first load."""
    body = {"model": "b", "messages": [{"role": "user", "content": "Say"}], "max_tokens": 1}
    line = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body}
    batch = Batch("batch_1", "", time.time(), True, {})
    turn = turn_of_line(batch, 1, json.dumps(line).encode())
    async with serving(model_dir, tmp_path, "ab") as service:
        await service.answered("a")
        async with keeping(service, tmp_path) as (store, _):
            await store.database.run(lambda cursor, _: insert_turn(cursor, turn, "", 0.0))
            await service.finish("b", await service.schedulers["b"].submits.get())
            while not (await store.find("", turn.id)).status.has_ended:
                pass
        assert service.device.history == ["a", "b"]


async def test_a_kept_stream_is_read_at_a_router_that_does_not_know_its_model_yet(
    model_dir, tmp_path
):
    async with (
        serving(model_dir, tmp_path, "ab") as service,
        keeping(service, tmp_path) as (_, client),
    ):
        asking = asyncio.create_task(
            client.responses.create(model="b", input="Say", max_output_tokens=1)
        )
        await service.finish("b", await service.schedulers["b"].submits.get())
        response = await asking
    async with serving(model_dir, tmp_path, "ab") as service:
        await service.answered("a")
        async with keeping(service, tmp_path) as (_, client):
            stream = await client.responses.retrieve(response.id, stream=True)
            *_, last = [event async for event in stream]
        assert last.response.output_text == response.output_text


async def test_an_idle_model_is_unloaded_and_loaded_again_by_the_next_request(model_dir, tmp_path):
    async with serving(model_dir, tmp_path, "a", idle_unload_s=0.05) as service:
        for _ in range(2):
            await until(lambda: service.device.loaded == {"a"})
            await until(lambda: not service.device.loaded)
            asking = service.ask("a")
            submit = await service.schedulers["a"].submits.get()
            # It may have come while the model was being unloaded, and waits at the scheduler then.
            await until(lambda: service.device.loaded == {"a"})
            await looked(service, 20)
            assert service.device.loaded == {"a"}, "it is not idle"
            await service.finish("a", submit)
            async with await asking as live:
                assert [event async for event in live]


async def test_a_model_that_another_router_uses_is_not_idle(model_dir, tmp_path):
    async with serving(model_dir, tmp_path, "a", idle_unload_s=0.01) as service:
        service.schedulers["a"].load.num_requests_running = 1
        await until(lambda: service.device.loaded)
        await looked(service, 20)
        assert service.device.loaded
        service.schedulers["a"].load.num_requests_running = 0
        await until(lambda: not service.device.loaded)


async def test_an_idle_model_that_cannot_be_unloaded_serves_on(model_dir, tmp_path):
    async with serving(model_dir, tmp_path, "a", idle_unload_s=0.01) as service:
        service.device.num_kept = 0
        await until(lambda: service.device.num_kept > 2)
        assert await service.answered("a")


async def test_an_idle_model_that_only_some_workers_could_unload_is_loaded_there_again(
    model_dir, tmp_path
):
    async with serving(model_dir, tmp_path, "a", idle_unload_s=0.01) as service:
        service.device.is_torn = True
        await until(lambda: service.device.history == ["a", "a"])
        assert not service.device.is_torn


async def test_a_worker_that_restarts_with_an_idle_model_brings_back_the_others(
    model_dir, tmp_path
):
    async with serving(model_dir, tmp_path, "a", idle_unload_s=0.05) as service:
        scheduler, on_demand = service.schedulers["a"], service.cells.on_demand
        await until(lambda: service.device.history and not service.device.loaded)
        on_demand._idle_unload_s = 3600
        service.device.loaded.add("a")
        scheduler.load.num_workers = scheduler.load.num_unloaded_workers = 1
        await scheduler.send_unloaded(False)
        await until(lambda: service.cells.all[0].schedulers.is_loaded)
        await looked(service, 20)
        assert service.device.history == ["a"], "it is still idle"
        await service.answered("a")
        await until(lambda: service.device.history == ["a", "a"])


async def test_a_request_that_comes_before_the_unload_prevents_it(model_dir, tmp_path):
    async with serving(model_dir, tmp_path, "a", idle_unload_s=3600) as service:
        on_demand = service.cells.on_demand
        await until(lambda: service.cells.all[0].schedulers.is_loaded)
        load_of, was_asked, may_answer = on_demand.load_of, asyncio.Event(), asyncio.Event()

        async def slow_load_of(cell):
            load = await load_of(cell)
            was_asked.set()
            await may_answer.wait()
            return load

        on_demand.load_of = slow_load_of
        on_demand._idle_unload_s = 0.0
        await was_asked.wait()
        on_demand._idle_unload_s = 3600
        asking = service.ask("a")
        submit = await service.schedulers["a"].submits.get()
        may_answer.set()
        await looked(service, 20)
        assert service.device.loaded == {"a"}
        assert service.device.history == ["a"]
        await service.finish("a", submit)
        await (await asking).aclose()


async def test_a_router_that_drains_unloads_no_idle_model(model_dir, tmp_path):
    async with serving(model_dir, tmp_path, "a", idle_unload_s=3600) as service:
        await until(lambda: service.cells.all[0].schedulers.is_loaded)
        service.cells.on_demand.drain()
        service.cells.on_demand._idle_unload_s = 0.0
        await looked(service, 20)
        assert service.device.loaded == {"a"}


async def test_a_model_whose_new_scheduler_knows_no_model_is_loaded_without_a_request(
    model_dir, tmp_path
):
    """Until then the router is not ready, so no request would come."""
    async with serving(model_dir, tmp_path, "a", idle_unload_s=0.05) as service:
        await until(lambda: service.device.loaded == {"a"})
        await until(lambda: not service.device.loaded)
        scheduler = service.schedulers["a"]
        await scheduler.stop()
        scheduler.knows_model.clear()
        await scheduler.start()
        await until(lambda: service.device.history == ["a", "a"])
        await until(lambda: service.cells.all[0].schedulers.is_ready)
