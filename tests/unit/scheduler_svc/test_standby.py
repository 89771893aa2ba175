"""A standby scheduler takes over when no worker's scheduler sends heartbeats."""

import asyncio
import contextlib
import time

import grpc
import grpc.aio
import pytest

from contract.errors import StaleEpochError
from contract.liveness.epoch import MAX_LEAD_NS, clock_epoch, epoch_after
from gpu_worker.service.attachments import Attachments
from quire.v1 import worker_pb2, worker_pb2_grpc
from rpc.peers.discovery import Discovery
from rpc.transport import DEFAULT_MAX_MESSAGE_MB, channel_options
from scheduler_svc.workers import standby
from scheduler_svc.workers.attach import newest_epoch
from scheduler_svc.workers.standby import wait_for_vacancy

pytestmark = pytest.mark.timeout(120)


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Its scheduler beats before each look, while it does not hang."""

    def __init__(self, epoch=7, *, has_scheduler=False, hangs=False, counts=True):
        self.epoch, self.has_scheduler, self.hangs = epoch, has_scheduler, hangs
        self.num_heartbeats = int(counts)
        self.is_cut_off = False
        self.num_looks = 0
        self.looked = asyncio.Condition()

    async def DescribeDevice(self, request, context):  # noqa: N802, ARG002
        async with self.looked:
            self.num_looks += 1
            self.looked.notify_all()
        if self.num_heartbeats and self.has_scheduler and not self.hangs:
            self.num_heartbeats += 1
        return worker_pb2.DescribeDeviceResponse(
            epoch=self.epoch,
            has_scheduler=self.has_scheduler,
            num_heartbeats=self.num_heartbeats,
            is_cut_off=self.is_cut_off,
        )

    async def wait_for_looks(self, num_looks):
        async with self.looked:
            await self.looked.wait_for(lambda: self.num_looks >= num_looks)


class BusyWorker(FakeWorker):
    """Answers every other time."""

    async def DescribeDevice(self, request, context):  # noqa: N802
        answer = await super().DescribeDevice(request, context)
        if self.num_looks % 2 == 0:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "busy")
        return answer


@pytest.fixture
async def serve(tmp_path):
    async with contextlib.AsyncExitStack() as stack:

        async def start(worker, name="w"):
            server = grpc.aio.server(options=channel_options(DEFAULT_MAX_MESSAGE_MB))
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
            target = f"unix:{tmp_path / name}.sock"
            server.add_insecure_port(target)
            await server.start()
            stack.push_async_callback(server.stop, None)
            return target

        yield start


class SlowLease:
    """A claim of it lasts until `may_answer`."""

    is_free = False

    def __init__(self):
        self.num_claims = 0
        self.may_answer = asyncio.Event()

    async def claim(self):
        self.num_claims += 1
        await self.may_answer.wait()
        return True


def stand_by(*targets, absence_s=0.0, silence_s=0.5, lease=None):
    return asyncio.create_task(
        wait_for_vacancy(Discovery(targets), absence_s, silence_s, lease=lease)
    )


def test_the_epoch_is_the_clock_and_newer_than_any_seen():
    assert clock_epoch() <= epoch_after(0) < clock_epoch() + 10**6
    ahead = clock_epoch() + MAX_LEAD_NS
    assert ahead < epoch_after(ahead) < ahead + 10**6


@pytest.mark.parametrize("seen", [9, clock_epoch() + MAX_LEAD_NS // 2], ids=["old", "ahead"])
def test_of_two_that_take_over_at_the_same_moment_one_gets_all_workers(seen, monkeypatch):
    now_ns = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now_ns)
    older, newer = sorted({epoch_after(seen) for _ in range(100)})[:2]
    workers = [Attachments(), Attachments()]
    workers[0].begin(older)
    workers[1].begin(newer)
    with pytest.raises(StaleEpochError):
        workers[1].begin(older)
    workers[0].begin(newer)
    assert {worker.newest.epoch for worker in workers} == {newer}


async def test_the_newest_epoch_is_of_the_workers_that_answer(serve, tmp_path):
    gone = f"unix:{tmp_path}/gone.sock"
    assert await newest_epoch(Discovery([gone])) == 0
    seen = [await serve(FakeWorker(epoch), f"w{epoch}") for epoch in (0, 4999)]
    assert await newest_epoch(Discovery([*seen, gone])) == 4999


async def test_it_waits_while_a_worker_has_a_scheduler_and_returns_the_newest_epoch(serve):
    one, other = FakeWorker(has_scheduler=True), FakeWorker(epoch=9)
    waiting = stand_by(await serve(one, "one"), await serve(other, "other"))
    await one.wait_for_looks(8)
    assert not waiting.done()
    one.has_scheduler = False
    assert await waiting == 9


async def test_it_takes_over_from_a_scheduler_that_is_silent_to_all_workers(serve):
    one, other = FakeWorker(has_scheduler=True), FakeWorker(has_scheduler=True)
    waiting = stand_by(await serve(one, "one"), await serve(other, "other"))
    await one.wait_for_looks(2)
    one.hangs = True
    num_looks = one.num_looks
    await one.wait_for_looks(num_looks + 8)
    assert not waiting.done(), "the other worker hears it"
    other.hangs = True
    await waiting


async def test_a_scheduler_that_returns_while_the_lease_is_claimed_keeps_its_workers(serve):
    worker, lease = FakeWorker(), SlowLease()
    waiting = stand_by(await serve(worker), lease=lease)
    while not lease.num_claims:
        await worker.wait_for_looks(worker.num_looks + 1)
    worker.has_scheduler = True
    await worker.wait_for_looks(worker.num_looks + 3)
    lease.may_answer.set()
    await worker.wait_for_looks(worker.num_looks + 3)
    assert not waiting.done()
    worker.has_scheduler = False
    await waiting
    assert lease.num_claims == 2


async def test_a_silence_that_is_too_short_counts_for_nothing(serve):
    worker = FakeWorker(has_scheduler=True)
    waiting = stand_by(await serve(worker))
    for _ in range(4):
        worker.hangs = not worker.hangs
        await worker.wait_for_looks(worker.num_looks + 3)
    assert not waiting.done()
    waiting.cancel()


async def test_it_takes_over_from_a_scheduler_that_beats_and_hears_no_router(serve):
    one, other = FakeWorker(has_scheduler=True), FakeWorker(has_scheduler=True)
    waiting = stand_by(await serve(one, "one"), await serve(other, "other"), silence_s=10.0)
    one.is_cut_off = True
    await one.wait_for_looks(15)
    assert not waiting.done(), "by the other worker, it hears one"
    other.is_cut_off = True
    await waiting


async def test_a_router_that_is_late_for_a_moment_changes_nothing(serve):
    worker = FakeWorker(has_scheduler=True)
    waiting = stand_by(await serve(worker))
    for _ in range(4):
        worker.is_cut_off = not worker.is_cut_off
        await worker.wait_for_looks(worker.num_looks + 3)
    assert not waiting.done()
    waiting.cancel()


async def test_a_worker_that_counts_no_beats_is_believed(serve):
    """Such as a worker of an earlier version."""
    worker = FakeWorker(has_scheduler=True, counts=False)
    waiting = stand_by(await serve(worker))
    await worker.wait_for_looks(8)
    assert not waiting.done()
    waiting.cancel()


async def test_it_does_not_wait_for_every_answer(serve):
    await stand_by(await serve(BusyWorker()), absence_s=0.3)


async def test_it_waits_for_a_worker(serve, tmp_path):
    waiting = stand_by(f"unix:{tmp_path}/w.sock")
    probe = FakeWorker(has_scheduler=True)
    beside = stand_by(await serve(probe, "probe"))
    await probe.wait_for_looks(3)
    assert not waiting.done()
    beside.cancel()
    await serve(FakeWorker())
    await waiting


async def test_a_worker_that_has_just_started_waits_for_the_scheduler_that_serves(
    serve, monkeypatch
):
    monkeypatch.setattr(standby, "_NEW_WORKER_S", 0.5)
    worker = FakeWorker(epoch=0)
    waiting = stand_by(await serve(worker))
    await worker.wait_for_looks(3)
    assert not waiting.done()
    await waiting


async def test_a_worker_that_has_just_started_delays_no_take_over(serve, monkeypatch):
    monkeypatch.setattr(standby, "_NEW_WORKER_S", float("inf"))
    await stand_by(await serve(FakeWorker(epoch=0), "new"), await serve(FakeWorker(), "old"))
