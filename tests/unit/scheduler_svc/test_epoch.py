"""Which epoch a scheduler takes, and when a standby takes over."""

import asyncio
import contextlib
import time

import grpc
import grpc.aio
import pytest

from quire.v1 import worker_pb2, worker_pb2_grpc
from rpc.peers.discovery import Discovery
from scheduler_svc.workers.attach import next_epoch, wait_for_vacancy


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, epoch=0, *, has_scheduler=False):
        self.epoch, self.has_scheduler = epoch, has_scheduler
        self.num_looks = 0
        self.looked = asyncio.Condition()

    async def DescribeDevice(self, request, context):  # noqa: N802, ARG002
        async with self.looked:
            self.num_looks += 1
            self.looked.notify_all()
        return worker_pb2.DescribeDeviceResponse(epoch=self.epoch, has_scheduler=self.has_scheduler)

    async def wait_for_looks(self, num_looks):
        async with self.looked:
            await self.looked.wait_for(lambda: self.num_looks >= num_looks)


class BusyWorker(FakeWorker):
    """A worker that answers every other call."""

    async def DescribeDevice(self, request, context):  # noqa: N802
        answer = await super().DescribeDevice(request, context)
        if self.num_looks % 2 == 0:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "busy")
        return answer


@pytest.fixture
async def serve(tmp_path):
    async with contextlib.AsyncExitStack() as stack:

        async def start(worker, name="w"):
            server = grpc.aio.server()
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
            target = f"unix:{tmp_path / name}.sock"
            server.add_insecure_port(target)
            await server.start()
            stack.push_async_callback(server.stop, None)
            return target

        yield start


async def test_the_epoch_is_the_clock_and_newer_than_any_seen(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time_ns", lambda: 5_000_000_999)
    gone = f"unix:{tmp_path}/gone.sock"
    assert await next_epoch(Discovery([gone])) == 5000
    seen = [await serve(FakeWorker(epoch), f"w{epoch}") for epoch in (0, 4999)]
    assert await next_epoch(Discovery([*seen, gone])) == 5000
    seen.append(await serve(FakeWorker(7000), "ahead"))
    assert await next_epoch(Discovery(seen)) == 7001


async def test_one_that_stands_by_waits_while_a_worker_has_a_scheduler(serve):
    one, other = FakeWorker(has_scheduler=True), FakeWorker()
    targets = [await serve(one, "one"), await serve(other, "other")]
    waiting = asyncio.create_task(wait_for_vacancy(Discovery(targets), absence_s=0.0))
    await one.wait_for_looks(3)
    assert not waiting.done()
    one.has_scheduler = False
    await waiting


@pytest.mark.timeout(120)
async def test_one_that_stands_by_does_not_wait_for_every_answer(serve):
    await wait_for_vacancy(Discovery([await serve(BusyWorker())]), absence_s=0.3)


async def test_one_that_stands_by_waits_for_a_worker(serve, tmp_path):
    waiting = asyncio.create_task(
        wait_for_vacancy(Discovery([f"unix:{tmp_path}/w.sock"]), absence_s=0.0)
    )
    probe = FakeWorker(has_scheduler=True)
    target = await serve(probe, "probe")
    beside = asyncio.create_task(wait_for_vacancy(Discovery([target]), absence_s=0.0))
    await probe.wait_for_looks(3)
    assert not waiting.done()
    beside.cancel()
    await serve(FakeWorker())
    await waiting
