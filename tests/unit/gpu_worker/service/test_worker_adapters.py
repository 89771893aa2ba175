"""A worker's `AdapterService`: what it loads and refuses, and what batches may name."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from contract.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    UnimplementedError,
)
from contract.info import WorkerInfo
from contract.lora import LoraAdapter
from contract.worker_limits import Limits
from gpu_worker.loading.worker_model import refuse_adapters
from gpu_worker.service.adapters import AdapterServicer
from gpu_worker.service.api import WorkerService
from gpu_worker.service.sampling_wire import adapter_from_proto
from quire.v1 import adapters_pb2, common_pb2, worker_pb2

LIMITS = Limits(
    max_num_seqs=3,
    max_model_len=32,
    max_num_batched_tokens=16,
    num_blocks=12,
    block_size=4,
    vocab_size=50,
    adapters={LoraAdapter("flag", b"f" * 32, "/adapters/f"): 1},
)
INFO = WorkerInfo("w0", "cpu", "base", LIMITS, (), 64, "float32")
A, B = "/adapters/a", "/adapters/b"


class Steps:
    """Keeps the adapters that it gets, by number."""

    def __init__(self):
        self.adapters = {1: "flag"}

    num_rows_used = 0

    async def attach(self, attachment):  # noqa: ARG002
        return SimpleNamespace(rows=())

    def add_adapter(self, number, adapter):
        assert number not in self.adapters
        self.adapters[number] = adapter.id.name
        return asyncio.sleep(0)

    def remove_adapter(self, number):
        del self.adapters[number]
        return asyncio.sleep(0)


def load(name, directory):
    """Load a fake adapter whose digest is the directory's last letter."""
    text = str(directory)
    return SimpleNamespace(id=LoraAdapter(name, text[-1:].encode() * 32, text))


class Worker:
    def __init__(self, load=load):
        self.service, self.steps = WorkerService(), Steps()
        self.servicer = AdapterServicer(self.service)
        self.service.open(INFO, self.steps)
        self.servicer.open(load, self.steps)

    async def attach(self, epoch):
        await self.service.Attach(worker_pb2.AttachRequest(epoch=epoch), None)

    async def load(self, name, directory, epoch=1):
        request = adapters_pb2.LoadAdapterRequest(name=name, directory=directory, epoch=epoch)
        return await self.servicer.LoadAdapter(request, None)

    async def unload(self, name, digest=b"", epoch=1):
        request = adapters_pb2.UnloadAdapterRequest(name=name, digest=digest * 32, epoch=epoch)
        await self.servicer.UnloadAdapter(request, None)

    def number(self, name, digest):
        """An adapter's number, found by the name and digest of a batch."""
        params = common_pb2.SamplingParams()
        params.adapter.name, params.adapter.digest = name, digest * 32
        return adapter_from_proto(params, self.service.adapters)

    async def attached_adapters(self):
        """The adapters that a scheduler learns when it attaches."""
        answer = await self.service.Attach(worker_pb2.AttachRequest(epoch=1), None)
        return [(each.name, each.directory) for each in answer.worker.model.adapters]


@pytest.fixture
async def worker():
    worker = Worker()
    await worker.attach(1)
    return worker


async def test_batches_may_name_loaded_adapters_and_schedulers_see_them(worker):
    loaded = await worker.load("sql", A)
    assert (loaded.adapter.name, loaded.adapter.digest) == ("sql", b"a" * 32)
    assert (loaded.adapter.directory, loaded.was_there) == (A, False)
    assert worker.steps.adapters[worker.number("sql", b"a")] == "sql"
    assert await worker.attached_adapters() == [("flag", "/adapters/f"), ("sql", A)]


async def test_what_is_unloaded_batches_may_not_name_and_its_number_is_not_used_again(worker):
    await worker.load("sql", A)
    first = worker.number("sql", b"a")
    await worker.unload("sql")
    assert worker.steps.adapters == {1: "flag"}
    with pytest.raises(InvalidArgumentError, match="this worker has 'flag'"):
        worker.number("sql", b"a")
    await worker.load("sql", A)
    assert worker.number("sql", b"a") > first
    await worker.unload("flag")
    assert await worker.attached_adapters() == [("sql", A)]


async def test_the_same_again_is_there_and_another_of_the_name_is_refused(worker):
    await worker.load("sql", A)
    assert (await worker.load("sql", A)).was_there
    assert (await worker.load("sql", "/copy/a")).adapter.directory == A
    problem = r"'sql' is loaded with other contents \(61616161; those of /adapters/b are 62626262\)"
    with pytest.raises(AlreadyExistsError, match=problem):
        await worker.load("sql", B)
    assert sorted(worker.steps.adapters.values()) == ["flag", "sql"]


@pytest.mark.parametrize(
    ("name", "directory", "problem"),
    [
        ("", A, "name is ''; it must be 1 to 128 printable characters"),
        ("x" * 129, A, "name is .*; it must be 1 to 128"),
        ("a\nb", A, "name is"),
        ("base", A, "name is 'base', which is the model's name in requests"),
        ("sql", "adapters/a", "directory is 'adapters/a'; it must be an absolute path"),
        ("sql", "", "directory is ''"),
    ],
)
async def test_names_and_directories_are_checked(worker, name, directory, problem):
    with pytest.raises(InvalidArgumentError, match=problem):
        await worker.load(name, directory)


async def test_an_adapter_that_is_not_loaded_cannot_be_unloaded(worker):
    with pytest.raises(NotFoundError, match="'sql' is not loaded"):
        await worker.unload("sql")


async def test_another_of_the_name_than_the_one_that_is_meant_stays(worker):
    await worker.load("sql", A)
    with pytest.raises(NotFoundError, match=r"'sql' \(62626262\) is not loaded"):
        await worker.unload("sql", digest=b"b")
    assert worker.number("sql", b"a") == 2
    await worker.unload("sql", digest=b"a")
    assert worker.steps.adapters == {1: "flag"}


async def test_only_the_newest_scheduler_is_obeyed(worker):
    await worker.attach(2)
    for call in (worker.load("sql", A), worker.unload("flag")):
        with pytest.raises(FailedPreconditionError, match="epoch is 1; epoch 2 has attached"):
            await call
    await worker.load("sql", A, epoch=2)


async def test_a_scheduler_that_is_gone_when_it_is_read_adds_nothing():
    reading, may_go_on = threading.Event(), threading.Event()

    def load_slowly(name, directory):
        reading.set()
        may_go_on.wait()
        return load(name, directory)

    worker = Worker(load_slowly)
    await worker.attach(1)
    loading = asyncio.create_task(worker.load("sql", A))
    await asyncio.to_thread(reading.wait)
    await worker.attach(2)
    may_go_on.set()
    with pytest.raises(FailedPreconditionError, match="epoch is 1; epoch 2 has attached"):
        await loading
    assert worker.steps.adapters == {1: "flag"}


async def test_a_worker_that_can_have_none_says_why():
    worker = Worker(refuse_adapters("model_class, which is a:B"))
    await worker.attach(1)
    with pytest.raises(UnimplementedError, match=r"'sql': the worker was started with model_class"):
        await worker.load("sql", A)


async def test_before_the_model_is_there_nothing_is_loaded():
    servicer = AdapterServicer(WorkerService())
    with pytest.raises(UnavailableError, match="still being loaded"):
        await servicer.LoadAdapter(adapters_pb2.LoadAdapterRequest(name="a", directory=A), None)
