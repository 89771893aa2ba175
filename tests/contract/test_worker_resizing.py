"""The behaviour of every worker whose pool can be resized."""

import grpc
import grpc.aio
from worker_calls import (
    LIMITS,
    PROMPT,
    ask,
    attach,
    batch,
    first_batch,
    held,
    refusal,
    resize,
    run_alone,
    sampled,
)

from contract.codec.packing import unpack_int32
from quire.v1 import worker_pb2
from tests.served_worker import failure


async def test_a_sequence_goes_on_while_the_pool_grows_and_shrinks(worker):
    expected = await run_alone(worker, 1)
    await attach(worker, 2)
    call = worker.Execute()
    tokens = list(sampled(await ask(call, first_batch(epoch=2))).values())
    await resize(worker, 20, epoch=2)
    for step_id in range(2, 9):
        position = len(PROMPT) + step_id - 2
        grown = {}
        if position % LIMITS.block_size == 0:
            grown = {"appended_rows": [0], "appended_block_ids": [17 + position // 4]}
        tokens += sampled(await ask(call, batch(step_id, 1, epoch=2, **grown))).values()
        if step_id == 3:  # its second block is the 19th
            code, details = await refusal(resize(worker, 18, epoch=2))
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert details == "num_blocks is 18; row 0 uses a block that would be removed"
    assert tokens == expected
    await ask(call, batch(9, epoch=2, released_rows=[0]))
    await resize(worker, 3, epoch=2)
    again = first_batch(10, epoch=2, blocks=(2,))
    assert list(sampled(await ask(call, again)).values()) == expected[:1]
    await call.write(batch(11, 1, epoch=2, appended_rows=[0], appended_block_ids=[3]))
    code, details = await failure(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "appended_block_ids" in details


async def test_the_next_scheduler_is_told_the_present_size_and_only_of_blocks_within(worker):
    await attach(worker, 1)
    call = worker.Execute()
    await ask(call, first_batch(blocks=(0,)))
    message = batch(2, released_rows=[0], labelled_block_ids=[4, 9])
    message.labels = b"a" * 32 + b"b" * 32
    await ask(call, message)
    await resize(worker, 9)
    assert (await attach(worker, 2)).worker.num_blocks == 9
    device = (await held(worker, 2)).device
    assert unpack_int32(device.block_ids, "block_ids").tolist() == [4]
    await resize(worker, 14, epoch=2)
    state = await worker.DescribeDevice(worker_pb2.DescribeDeviceRequest())
    assert (state.worker.num_blocks, state.worker.max_num_blocks) == (14, 20)
    await attach(worker, 3)
    device = (await held(worker, 3)).device
    assert unpack_int32(device.block_ids, "block_ids").tolist() == [4]


async def test_a_pool_is_resized_by_its_scheduler_and_within_its_bounds(worker):
    await attach(worker, 5)
    code, _ = await refusal(resize(worker, 8, epoch=4))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    for num_blocks in (0, 21):
        code, details = await refusal(resize(worker, num_blocks, epoch=5))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details == f"num_blocks is {num_blocks}; it must be in [1, 20]"
    await resize(worker, 12, epoch=5)  # the present size
