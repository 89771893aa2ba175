"""`quire defragment` against a fake of the scheduler."""

import asyncio

import grpc.aio
import pytest

from quire.cli.__main__ import main
from quire.v1 import scheduler_pb2, scheduler_pb2_grpc


class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    def __init__(self) -> None:
        self.error: str | None = None

    async def Defragment(self, request, context):  # noqa: ARG002, N802
        if self.error is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self.error)
        worker = scheduler_pb2.WorkerDefragmentation(
            worker="w:1", rate_before=0.75, rate_after=0.125, num_moved_blocks=9
        )
        return scheduler_pb2.DefragmentResponse(workers=[worker])


@pytest.fixture
async def scheduler(serve) -> tuple[str, FakeScheduler]:
    fake = FakeScheduler()
    return await serve(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, fake), fake


async def run(target: str) -> int:
    return await asyncio.to_thread(main, ["defragment", "--scheduler", target])


async def test_it_prints_what_was_done_at_each_worker(scheduler, capsys):
    target, _ = scheduler
    assert await run(target) == 0
    expected = "w:1: 9 blocks moved, fragmentation 75.0% before, 12.5% after\n"
    assert capsys.readouterr().out == expected


async def test_a_failure_is_one_line_and_exit_code_1(scheduler, capsys):
    target, fake = scheduler
    fake.error = "no worker is attached"
    assert await run(target) == 1
    assert capsys.readouterr().err == "quire: no worker is attached\n"
