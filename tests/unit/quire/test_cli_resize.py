"""`quire resize` against a fake of the scheduler."""

import asyncio

import pytest

from contract.errors import FailedPreconditionError
from quire.cli import target
from quire.cli.__main__ import main
from quire.v1 import scheduler_pb2, scheduler_pb2_grpc

GIB = 1024**3


class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    def __init__(self):
        self.requests = []
        self.block_bytes = GIB // 100
        self.error = None

    async def ResizeKv(self, request, context):  # noqa: N802
        self.requests.append(request)
        for num_leaving, is_done in ((7, False), (7, False), (0, False), (0, True)):
            answer = scheduler_pb2.ResizeKvResponse(
                num_blocks_before=4000,
                num_blocks=100,
                num_leaving_blocks=num_leaving,
                is_done=is_done,
                block_bytes=self.block_bytes,
            )
            await context.write(answer)
        if self.error is not None:
            raise self.error


@pytest.fixture
async def scheduler(serve):
    fake = FakeScheduler()
    fake.target = await serve(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, fake)
    return fake


async def run(*argv):
    return await asyncio.to_thread(main, ["resize", *argv])


async def test_it_says_how_far_it_is_and_what_has_become_of_it(scheduler, capsys):
    assert await run("--scheduler", scheduler.target, "--worker", "w:1", "--gib", "1.5") == 0
    assert capsys.readouterr().out.splitlines() == [
        "from 4,000 blocks (40.000 GiB) to 100 blocks (1.000 GiB): 7 blocks are still held",
        "from 4,000 blocks (40.000 GiB) to 100 blocks (1.000 GiB)",
        "100 blocks (1.000 GiB); before 4,000 blocks (40.000 GiB)",
    ]
    (request,) = scheduler.requests
    assert (request.worker, request.num_bytes) == ("w:1", 3 * GIB // 2)


async def test_a_size_may_be_in_blocks(scheduler, capsys):
    scheduler.block_bytes = 0
    assert await run("--scheduler", scheduler.target, "--blocks", "100") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "100 blocks; before 4,000 blocks"
    (request,) = scheduler.requests
    assert (request.worker, request.num_blocks) == ("", 100)


async def test_a_refusal_is_one_line_and_exit_code_1(scheduler, capsys):
    scheduler.error = FailedPreconditionError(
        "num_blocks is 65; the worker has room for at most 64"
    )
    assert await run("--scheduler", scheduler.target, "--blocks", "65") == 1
    assert capsys.readouterr().err == f"quire: {scheduler.error}\n"


@pytest.mark.parametrize("sizes", [[], ["--blocks", "1", "--gib", "1"]], ids=["none", "both"])
async def test_one_size_must_be_given(sizes, capsys):
    with pytest.raises(SystemExit) as caught:
        await run("--scheduler", "unix:/nowhere", *sizes)
    assert caught.value.code == 2
    assert "one of --blocks and --gib must be set" in capsys.readouterr().err


async def test_it_needs_a_scheduler(capsys, monkeypatch):
    monkeypatch.setattr(target, "running_services", lambda: iter(()))
    assert await run("--blocks", "100") == 1
    assert "--scheduler: is not set, and 0 services" in capsys.readouterr().err
