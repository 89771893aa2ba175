"""A worker's gRPC service: epochs, the stream of steps, and refusals."""

import asyncio

import grpc
import grpc.aio
import pytest
from fake_model import continue_greedily
from worker_service import (
    PROMPT,
    batch,
    first_batch,
    new_sequence,
)

from contract.codec.packing import unpack_int32
from gpu_worker.service.api import WorkerService
from quire.v1 import common_pb2, worker_pb2
from tests.served_worker import failure, served


async def test_attach_returns_the_worker_info(worker):
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
    # The worker works for a scheduler that attaches again.
    await worker.attach(1)
    call = worker.stub.Execute()
    await call.write(first_batch())
    assert (await call.read()).step_id == 1
    assert worker.step_loop.problem() is None


POOLED = common_pb2.SamplingParams(
    seed=1, pooling=common_pb2.Pooling(kind=common_pb2.POOLING_KIND_MEAN)
)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (batch(1, 1), "step_id is 1; it must be greater than 1"),
        (batch(2, 2), "epoch is 2, which has not attached; 1 has"),
        (
            worker_pb2.StepBatch(epoch=1, step_id=2, released_rows=b"abc"),
            "released_rows has 3 bytes; it must be a multiple of 4",
        ),
        (batch(1, 2, released_rows=[4]), "released_rows[0] is 4; it must be in [0, 3]"),
        (batch(1, 2, released_rows=[0, 0]), "released_rows has 0 twice"),
        (batch(1, 2, released_rows=[2]), "released_rows has 2, which is free"),
        (batch(1, 2, appended_rows=[0]), "appended_block_ids has 0 entries"),
        (
            batch(1, 2, appended_rows=[0], appended_block_ids=[12]),
            "appended_block_ids[0] is 12; it must be in [0, 11]",
        ),
        (batch(1, 2, chunk_rows=[1], chunk_lens=[0]), "chunk_lens[0] is 0; it must be in [1"),
        (
            batch(1, 2, new_sequences=[new_sequence(row=1, tokens=[97])]),
            "new_sequences.token_ids[0] is 97; it must be in [0, 96]",
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
            batch(1, 2, new_sequences=[new_sequence(row=1, note=b"n" * 3585)]),
            "new_sequences.note has 3585 bytes; it must have at most 3584",
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
        (
            batch(1, 2, new_sequences=[new_sequence(row=1, sampling=POOLED, max_total_tokens=9)]),
            "new_sequences.max_total_tokens is 9; with sampling.pooling it must be one more than",
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


async def test_attach_is_refused_before_the_model_is_loaded(tmp_path):
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
