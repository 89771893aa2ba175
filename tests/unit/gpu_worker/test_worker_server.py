import asyncio
import contextlib

import grpc
import grpc.aio
import numpy as np
import pytest
import torch
from fake_model import VOCAB_SIZE, FakeModel, FakePool, continue_greedily

from gpu_worker.executor import Executor
from gpu_worker.holdings import Holdings
from gpu_worker.server import WorkerService
from gpu_worker.step import Limits, StepOutput
from gpu_worker.step_loop import StepLoop
from gpu_worker.worker_info import WorkerInfo
from quire.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from rpc.channel import open_channel
from rpc.packing import pack_int32, unpack_int32
from rpc.status import ErrorInterceptor

LIMITS = Limits(
    max_num_seqs=4,
    max_model_len=32,
    max_num_batched_tokens=16,
    num_blocks=12,
    block_size=4,
    vocab_size=VOCAB_SIZE,
)
INFO = WorkerInfo("w0", "cpu", "fake", LIMITS, (96,), 64, "float32")
PROMPT = [5, 6, 7]


class Worker:
    """A worker behind a real socket, and a client of it."""

    def __init__(self, service, step_loop, stub):
        self.service = service
        self.step_loop = step_loop
        self.stub = stub

    async def attach(self, epoch):
        return await self.stub.Attach(worker_pb2.AttachRequest(epoch=epoch))


@pytest.fixture
async def worker(tmp_path):
    executor = Executor(
        FakeModel(), FakePool(LIMITS.num_blocks, LIMITS.block_size), LIMITS, (), torch.device("cpu")
    )
    step_loop = StepLoop(executor, asyncio.get_running_loop())
    service = WorkerService()
    service.open(INFO, step_loop)
    async with served(service, tmp_path / "worker.sock") as stub:
        yield Worker(service, step_loop, stub)
    await step_loop.stop()


@contextlib.asynccontextmanager
async def served(service, path):
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    service.service().add(server)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    try:
        async with open_channel(f"unix:{path}") as channel:
            yield worker_pb2_grpc.WorkerServiceStub(channel)
    finally:
        await server.stop(0)


def batch(epoch, step_id, num_decodes=0, **parts):
    packed = {
        name: pack_int32(value) if name != "new_sequences" else value
        for name, value in parts.items()
    }
    return worker_pb2.StepBatch(epoch=epoch, step_id=step_id, num_decodes=num_decodes, **packed)


def new_sequence(row=0, tokens=PROMPT, blocks=(0, 1, 2), **changes):
    values = {
        "seq_id": 1,
        "row": row,
        "token_ids": pack_int32(tokens),
        "num_prompt_tokens": len(tokens),
        "block_ids": pack_int32(blocks),
        "sampling": common_pb2.SamplingParams(seed=1, temperature=0),
        "max_total_tokens": 12,
    }
    return worker_pb2.NewSequence(**(values | changes))


def first_batch(epoch=1, step_id=1, **changes):
    return batch(
        epoch,
        step_id,
        new_sequences=[new_sequence(**changes)],
        chunk_rows=[0],
        chunk_lens=[len(PROMPT)],
    )


async def failure(call):
    """The code and message that a stream ends with, once it does."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code(), await call.details()


async def test_attach_tells_what_the_worker_has(worker):
    response = await worker.attach(3)
    assert response.worker.worker_id == "w0"
    assert response.worker.model.max_model_len == 32
    assert response.worker.model.eos_token_ids == [96]
    assert (response.worker.num_blocks, response.worker.block_size) == (12, 4)
    assert response.worker.max_num_seqs == 4


async def test_two_batches_in_flight_are_answered_in_order(worker):
    await worker.attach(1)
    call = worker.stub.Execute()
    await call.write(first_batch())
    await call.write(batch(1, 2, num_decodes=1))
    tokens = []
    for step_id in range(3, 10):
        result = await call.read()
        assert (result.epoch, result.step_id) == (1, step_id - 2)
        assert unpack_int32(result.sampled_rows, "sampled_rows").tolist() == [0]
        tokens += unpack_int32(result.sampled_token_ids, "sampled_token_ids").tolist()
        await call.write(batch(1, step_id, num_decodes=1))
    assert tokens == continue_greedily(PROMPT, 7)
    await call.done_writing()
    assert [(await call.read()).step_id for _ in range(2)] == [8, 9]
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    state = await worker.stub.DescribeDevice(worker_pb2.DescribeDeviceRequest())
    assert (state.epoch, state.step_id, state.num_rows_used) == (1, 9, 1)


async def test_an_older_epoch_may_neither_attach_nor_send(worker):
    await worker.attach(5)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.attach(4)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    call = worker.stub.Execute()
    await call.write(first_batch(epoch=4))
    code, message = await failure(call)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert message == "epoch is 4; epoch 5 has attached since"


async def test_a_newer_scheduler_ends_the_stream_of_the_older_and_frees_its_rows(worker):
    await worker.attach(1)
    old = worker.stub.Execute()
    await old.write(first_batch())
    await old.read()
    assert worker.step_loop.num_rows_used == 1
    await worker.attach(2)
    assert worker.step_loop.num_rows_used == 0
    code, _ = await failure(old)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    new = worker.stub.Execute()
    await new.write(first_batch(epoch=2))
    assert (await new.read()).step_id == 1


async def test_the_same_scheduler_may_attach_again_and_starts_over(worker):
    await worker.attach(1)
    first = worker.stub.Execute()
    await first.write(first_batch())
    await first.read()
    first.cancel()
    again = worker.stub.Execute()
    await again.write(batch(1, 2, num_decodes=1))
    assert (await failure(again))[0] is grpc.StatusCode.ALREADY_EXISTS
    await worker.attach(1)
    second = worker.stub.Execute()
    await second.write(first_batch())
    assert (await second.read()).step_id == 1


async def test_a_wrong_number_of_decodes_ends_the_stream_as_internal(worker):
    await worker.attach(1)
    call = worker.stub.Execute()
    await call.write(first_batch())
    await call.write(batch(1, 2, num_decodes=2))
    await call.write(batch(1, 3, num_decodes=1))
    assert (await call.read()).step_id == 1
    code, message = await failure(call)
    assert code is grpc.StatusCode.INTERNAL
    assert "num_decodes is 2, but 1 rows decode in step 2" in message
    # The worker goes on for a scheduler that starts over.
    await worker.attach(1)
    call = worker.stub.Execute()
    await call.write(first_batch())
    assert (await call.read()).step_id == 1
    assert worker.step_loop.problem() is None


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (batch(1, 1), "step_id is 1; it must be greater than 1"),
        (batch(2, 2), "epoch is 2, which has not attached; 1 has"),
        (
            worker_pb2.StepBatch(epoch=1, step_id=2, released_rows=b"abc"),
            "released_rows has 3 bytes; it must be a multiple of 4",
        ),
        (batch(1, 2, released_rows=[4]), "released_rows has 4; values must be in [0, 3]"),
        (batch(1, 2, released_rows=[0, 0]), "released_rows has 0 twice"),
        (batch(1, 2, released_rows=[2]), "released_rows has 2, which is free"),
        (batch(1, 2, appended_rows=[0]), "appended_block_ids has 0 entries"),
        (
            batch(1, 2, appended_rows=[0], appended_block_ids=[12]),
            "appended_block_ids has 12; values must be in [0, 11]",
        ),
        (batch(1, 2, chunk_rows=[1], chunk_lens=[0]), "chunk_lens has 0; values must be in [1"),
        (
            batch(1, 2, new_sequences=[new_sequence(row=1, tokens=[97])]),
            "new_sequences.token_ids has 97; values must be in [0, 96]",
        ),
        (
            batch(1, 2, new_sequences=[new_sequence(row=1, tokens=[])]),
            "new_sequences.token_ids has 0 entries; it must have 1 to 31",
        ),
        (
            batch(1, 2, new_sequences=[new_sequence(row=1, tokens=[1] * 9, blocks=[0, 1])]),
            "new_sequences.block_ids has 2 entries; it must have 3 to 8",
        ),
        (
            batch(1, 2, new_sequences=[new_sequence(row=1, num_computed_tokens=3)]),
            "new_sequences.num_computed_tokens is 3; it must be in [0, 2]",
        ),
        (
            batch(1, 2, new_sequences=[new_sequence(row=1, max_total_tokens=33)]),
            "new_sequences.max_total_tokens is 33; it must be in [4, 32]",
        ),
        (
            batch(1, 2, new_sequences=[new_sequence(row=1, sampling=common_pb2.SamplingParams())]),
            "new_sequences.sampling.seed is not set",
        ),
        (
            batch(
                1,
                2,
                new_sequences=[
                    new_sequence(
                        row=1,
                        sampling=common_pb2.SamplingParams(seed=1, temperature=float("nan")),
                    )
                ],
            ),
            "new_sequences.sampling.temperature is nan; it must be in [0, 100]",
        ),
    ],
)
async def test_a_bad_batch_is_refused_by_field_after_the_results_before_it(worker, bad, message):
    await worker.attach(1)
    call = worker.stub.Execute()
    await call.write(first_batch())
    await call.write(bad)
    assert (await call.read()).step_id == 1
    code, details = await failure(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(message)


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


async def test_a_scheduler_that_asked_is_told_of_a_drain_and_leaves_when_it_likes(worker):
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


async def test_a_scheduler_that_was_told_and_stays_is_left(worker):
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
    """Steps whose results come when the test says so."""

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
        none = np.empty(0, np.int32)
        steps.results[0].set_result(StepOutput(1, none, none, none, none, (), 3, 0.1))
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


async def until_open(service):
    """Wait until the handler of a stream runs: its client is not told."""
    async with asyncio.timeout(10):
        while not service._executions:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0)


async def test_before_the_model_is_there_nobody_may_attach(tmp_path):
    async with served(WorkerService(), tmp_path / "worker.sock") as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Attach(worker_pb2.AttachRequest(epoch=1))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "the model is still being loaded"


async def test_results_of_a_stream_that_broke_are_dropped_and_the_rows_stay(worker):
    await worker.attach(1)
    call = worker.stub.Execute()
    await call.write(first_batch())
    await call.read()
    call.cancel()
    await asyncio.wait([asyncio.ensure_future(call.code())])
    assert worker.step_loop.num_rows_used == 1


async def holdings(worker, epoch):
    call = worker.stub.ReadHoldings(worker_pb2.ReadHoldingsRequest(epoch=epoch))
    return [part async for part in call]


async def test_the_next_scheduler_is_told_of_rows_and_labels(worker):
    await worker.attach(1)
    assert await holdings(worker, 1) == []
    call = worker.stub.Execute()
    await call.write(first_batch(identity=b"i" * 32))
    first = await call.read()
    message = batch(1, 2, num_decodes=1, labelled_block_ids=[0, 7])
    message.labels = b"n" * 32 + b"m" * 32
    await call.write(message)
    second = await call.read()
    await worker.attach(2)
    rows, device = await holdings(worker, 2)
    (row,) = rows.rows
    sampled = [unpack_int32(each.sampled_token_ids, "") for each in (first, second)]
    assert row.identity == b"i" * 32
    assert unpack_int32(row.token_ids, "").tolist() == [*PROMPT, *np.concatenate(sampled)]
    assert row.num_computed_tokens == len(PROMPT) + 1
    assert unpack_int32(row.block_ids, "").tolist() == [0, 1, 2]
    assert unpack_int32(device.device.block_ids, "").tolist() == [7], "block 0 was written then"
    assert device.device.labels == b"m" * 32


async def test_holdings_can_be_read_until_the_first_step(worker):
    await worker.attach(1)
    call = worker.stub.Execute()
    await call.write(first_batch())
    await call.read()
    for epoch in (1, 2):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await holdings(worker, epoch)
        expected = grpc.StatusCode.FAILED_PRECONDITION
        assert raised.value.code() is (expected if epoch == 1 else grpc.StatusCode.INVALID_ARGUMENT)


async def test_after_a_step_that_failed_nothing_is_held(worker):
    await worker.attach(1)
    call = worker.stub.Execute()
    await call.write(first_batch(identity=b"i" * 32))
    await call.read()
    await call.write(batch(1, 2, num_decodes=3))
    await failure(call)
    await worker.attach(2)
    assert await holdings(worker, 2) == []


async def test_labels_of_another_size_are_refused(worker):
    await worker.attach(1)
    call = worker.stub.Execute()
    message = first_batch()
    message.labelled_block_ids = pack_int32([1])
    await call.write(message)
    code, details = await failure(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "labels has 0 bytes" in details
