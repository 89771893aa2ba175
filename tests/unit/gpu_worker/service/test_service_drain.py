"""A worker's gRPC service while it drains: it sends its results, and then ends streams."""

import asyncio

import grpc
import grpc.aio
import pytest
from worker_service import INFO, batch, first_batch, until_open

from contract.state import Holdings
from contract.step import Result
from gpu_worker.service.api import WorkerService
from quire.v1 import worker_pb2
from tests.served_worker import failure, served


async def test_draining_ends_the_stream_after_its_results_and_refuses_more(worker):
    await worker.attach(1)
    call = worker.stub.Execute()
    await call.write(first_batch())
    await call.read()
    await worker.service.drain(0)
    code, _ = await failure(call)
    assert code is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.attach(2)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_scheduler_that_awaits_a_drain_is_notified_and_ends_its_stream_itself(worker):
    await worker.attach(1)
    asked = asyncio.ensure_future(worker.stub.AwaitDrain(worker_pb2.AwaitDrainRequest()))
    call = worker.stub.Execute()
    await call.write(first_batch())
    await call.read()
    assert not asked.done()
    drain = asyncio.create_task(worker.service.drain(60))
    await asked
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.attach(2)
    assert "draining" in caught.value.details()
    await call.write(batch(1, 2, 1))
    assert (await call.read()).step_id == 2
    assert not drain.done()
    call.cancel()
    await drain


async def test_a_scheduler_that_stays_after_the_notice_is_disconnected(worker):
    await worker.attach(1)
    asked = asyncio.ensure_future(worker.stub.AwaitDrain(worker_pb2.AwaitDrainRequest()))
    call = worker.stub.Execute()
    await call.write(first_batch())
    await call.read()
    drain = asyncio.create_task(worker.service.drain(0.01))
    await asked
    assert (await failure(call))[0] is grpc.StatusCode.UNAVAILABLE
    await drain


class SlowSteps:
    """Steps whose results come when the test releases them."""

    num_rows_used = 0

    def __init__(self):
        self.results = []

    async def attach(self, attachment):  # noqa: ARG002
        return Holdings()

    def submit(self, *_):
        self.results.append(asyncio.get_running_loop().create_future())
        return self.results[-1]


async def test_draining_waits_for_the_steps_that_run(tmp_path):
    service, steps = WorkerService(), SlowSteps()
    service.open(INFO, steps)
    async with served(service, tmp_path / "worker.sock") as stub:
        await stub.Attach(worker_pb2.AttachRequest(epoch=1))
        call = stub.Execute()
        await call.write(first_batch())
        async with asyncio.timeout(10):
            while not steps.results:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0)
        drain = asyncio.create_task(service.drain(0))
        with pytest.raises(grpc.aio.AioRpcError):  # a round trip: the drain has begun
            await stub.Attach(worker_pb2.AttachRequest(epoch=2))
        assert not drain.done()
        steps.results[0].set_result(Result(1, num_computed_tokens=3, execute_s=0.1))
        assert (await call.read()).step_id == 1
        await drain
        assert (await failure(call))[0] is grpc.StatusCode.UNAVAILABLE


async def test_a_stream_whose_scheduler_went_while_it_wrote_holds_up_no_drain(worker):
    await worker.attach(1)
    call = worker.stub.Execute()
    await call.write(first_batch())
    call.cancel()
    await worker.service.drain(0)
    assert not worker.service._executions


@pytest.mark.parametrize("event", ["drain", "attach"])
async def test_a_stream_that_has_sent_nothing_ends_too(worker, event):
    await worker.attach(1)
    call = worker.stub.Execute()
    await call.wait_for_connection()
    await until_open(worker.service)
    await (worker.service.drain(0) if event == "drain" else worker.attach(2))
    assert (await failure(call))[0] is grpc.StatusCode.UNAVAILABLE
