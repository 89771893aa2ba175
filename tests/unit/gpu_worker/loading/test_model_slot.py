"""A worker unloads and loads its model: the memory that it frees, and its reports."""

import asyncio
import contextlib
import gc
import shutil
import weakref

import grpc
import pytest

from contract.codec.packing import pack_int32, unpack_int32
from contract.errors import UnimplementedError
from gpu_worker.app import StepsFailedError, run_worker
from gpu_worker.kv.device_pool import KvPool
from gpu_worker.kv.disk_pool import DiskPool
from gpu_worker.kv.host_pool import HostPool
from gpu_worker.loading import kv_memory
from gpu_worker.loading.model_slot import ModelSlot
from gpu_worker.memory.elastic import OutOfMemoryError
from gpu_worker.metrics import UNLOADED
from gpu_worker.models.llama.decoder import LlamaDecoder
from gpu_worker.models.transformers.model import TransformersModel
from gpu_worker.service.adapters import AdapterServicer
from gpu_worker.service.api import WorkerService
from gpu_worker.settings import WorkerSettings
from gpu_worker.step.executor import Executor
from gpu_worker.step_loop import StepLoop
from quire.v1 import (
    adapters_pb2,
    adapters_pb2_grpc,
    common_pb2,
    loading_pb2,
    loading_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from rpc.health import Health
from rpc.peers.channel import open_channel
from tests.lora_fixture import make_adapter
from tests.models_fixture import make_model

KINDS = (Executor, KvPool, HostPool, DiskPool, LlamaDecoder, TransformersModel)
"""The classes that hold a model's memory."""
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny", "llama")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "other", "llama", seed=1)


class Worker:
    """A running worker, and its scheduler."""

    def __init__(self, channel):
        self.loading = loading_pb2_grpc.LoadingServiceStub(channel)
        self.adapters = adapters_pb2_grpc.AdapterServiceStub(channel)
        self.stub = worker_pb2_grpc.WorkerServiceStub(channel)

    async def attach(self, epoch=1):
        return await self.stub.Attach(worker_pb2.AttachRequest(epoch=epoch))

    async def describe(self):
        return await self.stub.DescribeDevice(worker_pb2.DescribeDeviceRequest())

    async def unload(self, epoch=1, **options):
        request = loading_pb2.UnloadRequest(epoch=epoch, **options)
        return (await self.loading.Unload(request)).workers[0].was_unloaded

    async def load(self, directory="", epoch=1, **options):
        request = loading_pb2.LoadRequest(epoch=epoch, directory=str(directory), **options)
        return [told async for told in self.loading.Load(request)]

    async def tokens(self, count, **sampling):
        call = self.stub.Execute()
        sequence = worker_pb2.NewSequence(
            row=0,
            token_ids=pack_int32(PROMPT),
            num_prompt_tokens=len(PROMPT),
            block_ids=pack_int32(list(range(4))),
            sampling=common_pb2.SamplingParams(seed=1, temperature=0, ignore_eos=True, **sampling),
            max_total_tokens=len(PROMPT) + count + 5,
        )
        step = worker_pb2.StepBatch(
            epoch=1,
            step_id=1,
            new_sequences=[sequence],
            chunk_rows=pack_int32([0]),
            chunk_lens=pack_int32([len(PROMPT)]),
        )
        tokens = []
        for step_id in range(2, count + 2):
            await call.write(step)
            result = await call.read()
            tokens += unpack_int32(result.sampled_token_ids, "sampled_token_ids").tolist()
            step = worker_pb2.StepBatch(epoch=1, step_id=step_id, num_decodes=1)
        self.call = call  # the stream stays open
        return tokens


@contextlib.asynccontextmanager
async def running(model, tmp_path, **changes):
    values = {
        "model": model,
        "uds": tmp_path / "worker.sock",
        "http_port": 0,
        "device": "cpu",
        "dtype": "float32",
        "num_blocks": 20,
        "num_threads": 1,
        "worker_id": "w",
    }
    settings = WorkerSettings(_env_file=None, **(values | changes))
    stop, started = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def on_started(addresses):
        started.set_result(addresses.grpc)

    task = asyncio.create_task(run_worker(settings, on_started=on_started, stop=stop))
    await asyncio.wait([started, task], return_when=asyncio.FIRST_COMPLETED)
    try:
        async with open_channel(started.result()) as channel:
            yield Worker(channel)
    finally:
        stop.set()
        await task


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code().name, caught.value.details()


def holders():
    gc.unfreeze()  # `gc.get_objects` does not list frozen objects
    found = [each for each in gc.get_objects() if type(each) in KINDS]
    gc.freeze()
    return {id(each): weakref.ref(each) for each in found}


@pytest.mark.parametrize("model_class", ["", "transformers"])
async def test_nothing_of_a_model_is_left_and_it_comes_back_as_it_was(model, tmp_path, model_class):
    before = holders().keys()
    tiers = {"host_kv_memory_gb": 0.01, "disk_kv_memory_gb": 0.02, "disk_kv_dir": tmp_path}
    async with running(model, tmp_path, model_class=model_class, **tiers) as worker:
        first = (await worker.attach()).worker
        tokens = await worker.tokens(8)
        held = {key: ref for key, ref in holders().items() if key not in before}
        kinds = {type(ref()) for ref in held.values()}
        assert kinds >= {Executor, KvPool, HostPool, DiskPool}
        assert len(kinds) == 5
        assert not await worker.unload()
        assert [ref() for ref in held.values() if ref() is not None] == []
        assert UNLOADED._value.get() == 1
        told = await worker.load()
        assert (told[-1].worker, told[-1].is_done, told[-1].was_loaded) == ("w", True, False)
        assert UNLOADED._value.get() == 0
        again = await worker.attach()
        assert not again.is_unloaded
        assert again.worker.instance_id != first.instance_id
        assert again.worker.model == first.model
        assert await worker.tokens(8) == tokens


async def test_the_pools_memory_goes_whoever_still_has_a_view_of_it(model, tmp_path, monkeypatch):
    pools = []
    init = KvPool.__init__

    def keep(pool, *args):
        init(pool, *args)
        pools.append(pool)

    monkeypatch.setattr(KvPool, "__init__", keep)
    async with running(model, tmp_path) as worker:
        view = pools[-1].blocks_as_bytes[:20]
        pools.clear()
        await worker.attach()
        await worker.tokens(4)
        assert view.any()
        await worker.unload()
        assert not view.any()  # the process has returned the pages to the system


async def test_without_its_model_it_is_its_schedulers_and_can_do_nothing(model, tmp_path):
    async with running(model, tmp_path) as worker:
        info = (await worker.attach()).worker
        assert info.can_unload
        await worker.tokens(2)
        await worker.unload()
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await worker.call.read() is not grpc.aio.EOF:
                pass
        assert await worker.call.details() == "the model is unloaded"
        assert (await worker.attach(2)).is_unloaded  # the next scheduler is told, too
        state = await worker.describe()
        assert (state.is_unloaded, state.epoch, state.has_scheduler) == (True, 2, True)
        assert state.num_rows_used == 0
        held = worker.stub.ReadHoldings(worker_pb2.ReadHoldingsRequest(epoch=2))
        assert await refusal(held.read()) == ("UNAVAILABLE", "the model is unloaded")
        adapter = adapters_pb2.LoadAdapterRequest(name="a", directory="/a", epoch=2)
        assert await refusal(worker.adapters.LoadAdapter(adapter)) == (
            "UNAVAILABLE",
            "the model is unloaded",
        )
        assert await worker.unload(2)
        assert (await refusal(worker.unload(1)))[0] == "FAILED_PRECONDITION"
        assert (await refusal(worker.load(epoch=1)))[0] == "FAILED_PRECONDITION"
        assert (await refusal(worker.unload(2, worker="w")))[1].startswith("worker is 'w'")


async def test_another_model_is_loaded_in_its_place(model, other, tmp_path):
    lora = (f"sql={make_adapter(tmp_path / 'sql', model, seed=1)}",)
    async with running(model, tmp_path, served_model_name="base", lora=lora) as worker:
        first = (await worker.attach()).worker.model
        assert (first.id, first.directory) == ("base", "")
        assert [each.name for each in first.adapters] == ["sql"]
        tokens = await worker.tokens(8)
        code, details = await refusal(worker.load(other))
        assert code == "FAILED_PRECONDITION"
        assert details.endswith(f"the model in {model} is loaded: unload it first")
        (told,) = await worker.load(model)
        assert told.was_loaded
        await worker.unload()
        await worker.load(other)
        second = (await worker.attach()).worker.model
        assert (second.id, second.directory, list(second.adapters)) == ("other", str(other), [])
        assert await worker.tokens(8) != tokens
        await worker.unload()
        await worker.load()  # the last model
        assert (await worker.attach()).worker.model == second
        await worker.unload()
        await worker.load(model)
        assert (await worker.attach()).worker.model == first
        assert await worker.tokens(8) == tokens


async def test_a_failed_load_leaves_the_worker_unloaded(model, tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    (broken / "model.safetensors").unlink()
    async with running(model, tmp_path) as worker:
        await worker.attach()
        await worker.unload()
        code, details = await refusal(worker.load(tmp_path / "nothing"))
        assert code == "INVALID_ARGUMENT"
        assert details.startswith(f"directory is {tmp_path}/nothing: ")
        code, details = await refusal(worker.load(broken))
        assert code == "INVALID_ARGUMENT"
        assert (await refusal(worker.load("models/tiny"))) == (
            "INVALID_ARGUMENT",
            "directory is 'models/tiny'; it must be an absolute path",
        )

        def no_room(*_):
            raise OutOfMemoryError("1 byte more is needed")

        with monkeypatch.context() as patch:
            patch.setattr(kv_memory.ElasticMemory, "__init__", no_room)
            code, details = await refusal(worker.load())
        assert code == "FAILED_PRECONDITION"
        assert "1 byte more is needed" in details
        with monkeypatch.context() as patch:
            patch.setattr(kv_memory, "available_bytes", lambda: 1)
            patch.setattr(
                "gpu_worker.loading.rank_model._num_blocks", lambda *_: kv_memory.blocks_in(1, 2)
            )
            assert (await refusal(worker.load()))[0] == "FAILED_PRECONDITION"
        assert (await worker.attach()).is_unloaded
        assert (await worker.load())[-1].is_done
        assert not (await worker.attach()).is_unloaded


async def test_a_load_during_a_load_joins_it_and_reports_progress(
    model, other, tmp_path, monkeypatch
):
    async with running(model, tmp_path) as worker:
        await worker.attach()
        await worker.unload()
        may_go = asyncio.Event()
        loop = asyncio.get_running_loop()
        init = KvPool.__init__

        def wait(pool, *args):
            asyncio.run_coroutine_threadsafe(may_go.wait(), loop).result()
            init(pool, *args)

        monkeypatch.setattr(KvPool, "__init__", wait)
        first = worker.loading.Load(loading_pb2.LoadRequest(epoch=1))
        while (await first.read()).status != "making room for KV":
            pass
        first.cancel()  # the load continues
        code, details = await refusal(worker.load(other))
        assert (code, details) == (
            "FAILED_PRECONDITION",
            f"directory is {other}; the model in {model} is being loaded",
        )
        assert (await refusal(worker.unload()))[0] == "FAILED_PRECONDITION"
        second = worker.loading.Load(loading_pb2.LoadRequest(epoch=1))
        assert (await second.read()).status == "making room for KV"
        may_go.set()
        assert [told.is_done async for told in second][-1]
        assert not (await worker.attach()).is_unloaded


async def test_a_load_during_an_unload_starts_afterwards(model, tmp_path, monkeypatch):
    goes, may_go = asyncio.Event(), asyncio.Event()
    close = AdapterServicer.close

    async def wait(adapters):
        goes.set()
        await may_go.wait()
        await close(adapters)

    monkeypatch.setattr(AdapterServicer, "close", wait)
    async with running(model, tmp_path) as worker:
        await worker.attach()
        unloading = asyncio.create_task(worker.unload())
        await goes.wait()
        loading = worker.loading.Load(loading_pb2.LoadRequest(epoch=1))
        assert (await loading.read()).status == "waiting"
        may_go.set()
        assert not await unloading
        *_, told = [told async for told in loading]
        assert (told.is_done, told.was_loaded) == (True, False)
        assert not (await worker.attach()).is_unloaded


async def test_a_worker_with_a_hung_step_reports_it_and_ends(model, tmp_path, monkeypatch):
    stop = StepLoop.stop
    said = []

    async def stop_in_vain(steps):
        await stop(steps)
        return False

    async def run():
        async with running(model, tmp_path) as worker:
            await worker.attach()
            said.extend(await refusal(worker.unload()))

    monkeypatch.setattr(StepLoop, "stop", stop_in_vain)
    with pytest.raises(StepsFailedError, match="a step takes too long"):
        await run()
    assert said == [
        "UNAVAILABLE",
        "the model's memory cannot be freed: a step takes too long",
    ]


async def test_one_that_ends_without_its_model_ends_well(model, tmp_path):
    async with running(model, tmp_path) as worker:
        await worker.attach()
        await worker.unload()


async def test_a_model_on_several_devices_stays(model):
    settings = WorkerSettings(_env_file=None, model=model, tensor_parallel_size=2)
    service = WorkerService()
    slot = ModelSlot(settings, service, AdapterServicer(service), Health(), on_failure=lambda: None)
    for ask in (slot.unload, lambda: asyncio.to_thread(slot.begin_load, None)):
        with pytest.raises(UnimplementedError, match="it was started with tensor_parallel_size"):
            await ask()
