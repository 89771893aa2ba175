"""`quire unload` and `quire load` against a fake of the scheduler."""

import asyncio
from pathlib import Path

import pytest

from contract.errors import FailedPreconditionError
from quire.cli.__main__ import main
from quire.cli.commands.observe.status import describe_load
from quire.cli.top.view import _worker_cells, _worker_name
from quire.client.types import Load
from quire.v1 import common_pb2, loading_pb2, loading_pb2_grpc

TARGET = "10.0.0.7:50053"
HERE = str(Path("models/b").absolute())


class FakeScheduler(loading_pb2_grpc.LoadingServiceServicer):
    def __init__(self):
        self.unloaded = set()
        self.directories = []

    async def Unload(self, request, context):  # noqa: N802, ARG002
        worker = request.worker or TARGET
        unloaded = loading_pb2.UnloadedWorker(worker=worker, was_unloaded=worker in self.unloaded)
        self.unloaded.add(worker)
        return loading_pb2.UnloadResponse(workers=[unloaded])

    async def Load(self, request, context):  # noqa: N802, ARG002
        worker = request.worker or TARGET
        self.directories.append(request.directory)
        for progress in (0.1, 0.2, 0.6):
            yield loading_pb2.LoadResponse(
                worker=worker, status="loading weights", progress=progress
            )
        if request.directory == "/nothing":
            raise FailedPreconditionError("there is no memory")
        was_loaded = worker not in self.unloaded
        self.unloaded.discard(worker)
        yield loading_pb2.LoadResponse(worker=worker, is_done=True, was_loaded=was_loaded)


@pytest.fixture
async def scheduler(serve):
    fake = FakeScheduler()
    fake.target = await serve(loading_pb2_grpc.add_LoadingServiceServicer_to_server, fake)
    return fake


async def run(scheduler, *argv):
    return await asyncio.to_thread(main, [*argv, "--scheduler", scheduler.target])


async def test_a_worker_is_unloaded_and_loaded_and_it_is_shown_how_far_it_is(scheduler, capsys):
    assert await run(scheduler, "unload", TARGET) == 0
    told, hint = capsys.readouterr().out.splitlines()
    assert told == f"{TARGET} is unloaded"
    assert " load` loads it again" in hint
    assert await run(scheduler, "unload") == 0
    assert f"{TARGET} was unloaded already" in capsys.readouterr().out
    assert await run(scheduler, "load", TARGET) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{TARGET}: loading weights 10%",
        f"{TARGET}: loading weights 60%",
        f"{TARGET}: ready",
        f"{TARGET} is loaded",
    ]
    assert await run(scheduler, "load") == 0
    assert f"{TARGET} was loaded already" in capsys.readouterr().out
    assert scheduler.directories == ["", ""]


async def test_another_model_is_named_from_where_the_user_is(scheduler):
    assert await run(scheduler, "load", "--model", "models/b") == 0
    assert scheduler.directories == [HERE]


async def test_refusals_are_reported(scheduler, capsys):
    assert await run(scheduler, "load", "--model", "/nothing") == 1
    assert capsys.readouterr().err == "quire: there is no memory\n"


def load(**changes):
    values = {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "max_num_seqs": 0,
        "num_blocks": 0,
        "num_free_blocks": 0,
        "num_cached_blocks": 0,
        "block_size": 0,
        "num_workers": 0,
    }
    return Load(**(values | changes))


def test_the_status_says_what_requests_wait_for():
    told = describe_load(load(num_workers=1, num_unloaded_workers=2)).splitlines()[0]
    assert told.endswith("1 worker, 2 unloaded")
    told = describe_load(load(num_unloaded_workers=1, num_requests_waiting=3)).splitlines()[0]
    assert told.endswith("0 workers, 1 unloaded; 3 requests wait for a model to be loaded")


def test_top_shows_a_worker_that_is_unloaded():
    worker = common_pb2.WorkerActivity(worker=TARGET, is_unloaded=True)
    assert _worker_name(worker).plain == f"{TARGET} unloaded"
    assert _worker_cells(worker, None, None) == []
