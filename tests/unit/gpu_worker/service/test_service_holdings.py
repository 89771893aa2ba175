"""The holdings that a worker reports to the next scheduler: rows, and labelled blocks."""

import grpc
import grpc.aio
import numpy as np
import pytest
from worker_service import PROMPT, batch, first_batch

from contract.codec.packing import pack_int32, unpack_int32
from quire.v1 import worker_pb2
from tests.served_worker import failure


async def holdings(worker, epoch):
    call = worker.stub.ReadHoldings(worker_pb2.ReadHoldingsRequest(epoch=epoch))
    return [part async for part in call]


async def test_the_next_scheduler_gets_rows_and_labels(worker):
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


@pytest.mark.parametrize(
    ("labels", "seconds", "problem"),
    [
        (b"a" * 31, [1.0], "pinned_labels has 31 bytes"),
        (b"", [1.0], "pinned_labels has 0 bytes"),
        (b"a" * 32, [0.0], "pinned_s is 0"),
        (b"a" * 32, [float("nan")], "pinned_s is nan"),
    ],
)
async def test_pins_that_cannot_be_are_refused(worker, labels, seconds, problem):
    await worker.attach(1)
    call = worker.stub.Execute()
    message = first_batch()
    message.pinned_labels, message.pinned_s[:] = labels, seconds
    await call.write(message)
    code, details = await failure(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert problem in details


async def test_labels_of_another_size_are_refused(worker):
    await worker.attach(1)
    call = worker.stub.Execute()
    message = first_batch()
    message.labelled_block_ids = pack_int32([1])
    await call.write(message)
    code, details = await failure(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "labels has 0 bytes" in details
