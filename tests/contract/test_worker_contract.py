"""The behaviour of every worker by worker.proto, tested with the real and the simulated one."""

import grpc
import grpc.aio
import numpy as np
import pytest
from worker_calls import (
    PROMPT,
    VOCAB_SIZE,
    ask,
    attach,
    batch,
    first_batch,
    held,
    run_alone,
    sampled,
    sequence,
    with_moves,
)

from contract.codec.packing import unpack_int32
from contract.liveness.epoch import MAX_LEAD_NS, clock_epoch, epoch_after
from quire.v1 import worker_pb2
from tests.served_worker import failure


async def test_the_next_scheduler_goes_on_where_the_one_before_was(worker):
    """The KV stays in its labelled blocks; tokens are those of a run with one scheduler."""
    expected = await run_alone(worker, 1, num_steps=6)
    await attach(worker, 2)
    call = worker.Execute()
    first = first_batch(epoch=2, blocks=(0, 1, 2))
    first.new_sequences[0].identity = b"i" * 32
    first.new_sequences[0].note = b"note"
    first.new_sequences[0].sampling.logprobs = 2
    told = [(await ask(call, first)).logprobs[0].logprob]
    message = batch(2, 1, epoch=2, labelled_block_ids=[0, 5, 9])
    message.labels = b"a" * 32 + b"b" * 32 + b"c" * 32
    message = with_moves(message, copy=([5], [6]))
    message.pinned_labels, message.pinned_s[:] = b"b" * 32 + b"d" * 32, [600.0, 1e-9]
    told += [(await ask(call, message)).logprobs[0].logprob]
    told += [(await ask(call, batch(3, 1, epoch=2))).logprobs[0].logprob]
    await attach(worker, 3)
    whole = await held(worker, 3)
    (row,) = whole.rows
    tokens = unpack_int32(row.token_ids, "token_ids").tolist()
    assert tokens == [*PROMPT, *expected[:3]]
    assert row.num_computed_tokens == len(tokens) - 1
    assert row.note == b"note"
    assert list(row.logprobs) == told
    labels = whole.device.labels
    blocks = unpack_int32(whole.device.block_ids, "block_ids").tolist()
    named = {block: labels[32 * i] for i, block in enumerate(blocks)}
    assert {b: named.get(b) for b in (5, 6, 9)} == {5: ord("b"), 6: ord("b"), 9: ord("c")}
    assert whole.pins.labels == b"b" * 32, "the time of the other is over"
    assert 0 < whole.pins.left_s[0] < 600
    call = worker.Execute()
    again = sequence(tokens=tokens, blocks=(0, 1, 2), computed=len(tokens) - 1)
    again.num_prompt_tokens = len(PROMPT)
    result = await ask(call, batch(1, epoch=3, new=[again], chunk_rows=[0], chunk_lens=[1]))
    assert sampled(result) == {0: expected[3]}


async def test_attach_returns_the_worker(worker):
    info = (await attach(worker)).worker
    assert (info.worker_id, info.model.id, info.model.vocab_size) == ("w0", "fake", VOCAB_SIZE)
    assert (info.num_blocks, info.block_size, info.max_num_seqs) == (12, 4, 4)
    assert info.model.eos_token_ids == [96]


@pytest.mark.parametrize(
    "epoch", [0, clock_epoch() + 2 * MAX_LEAD_NS, 2**64 - 1], ids=["none", "future", "last"]
)
async def test_an_epoch_after_which_none_may_come_may_not_attach(worker, epoch):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await attach(worker, epoch)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"epoch is {epoch}; it must be in [1, " in caught.value.details()
    await attach(worker, epoch_after(0))


async def test_there_is_always_a_newer_epoch(worker):
    ahead = clock_epoch() + MAX_LEAD_NS
    await attach(worker, ahead)
    state = await worker.DescribeDevice(worker_pb2.DescribeDeviceRequest())
    assert (await attach(worker, epoch_after(state.epoch))).former_epoch == ahead


async def test_a_worker_reports_whether_it_has_a_live_scheduler(worker):
    async def state(epoch=0):
        return await worker.DescribeDevice(worker_pb2.DescribeDeviceRequest(epoch=epoch))

    assert not (await state()).has_scheduler
    assert (await attach(worker, 2)).former_epoch == 0
    attached = await state()
    assert attached.has_scheduler, "its stream will come"
    call = worker.Execute()
    await ask(call, first_batch(epoch=2))
    beats = [attached.num_heartbeats] + [
        (await state(epoch)).num_heartbeats for epoch in (0, 2, 3, 1)
    ]
    assert np.diff(beats).tolist() == [1, 1, 0, 0], "a batch and a call of its own epoch"
    for is_cut_off, epoch in ((True, 2), (False, 0), (True, 0), (False, 1)):
        request = worker_pb2.DescribeDeviceRequest(epoch=epoch, is_cut_off=is_cut_off)
        assert (await worker.DescribeDevice(request)).is_cut_off, "as its scheduler said last"
    assert not (await state(epoch=2)).is_cut_off
    call.cancel()
    while (await state()).has_scheduler:
        pass
    assert (await attach(worker, 3)).former_epoch == 2
    assert (await state()).has_scheduler


async def test_an_older_epoch_may_neither_attach_nor_send(worker):
    await attach(worker, 5)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await attach(worker, 4)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    call = worker.Execute()
    await call.write(first_batch(epoch=4))
    assert (await failure(call))[0] is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_newer_epoch_ends_the_older_ones_stream_and_frees_its_rows(worker):
    await attach(worker, 1)
    old = worker.Execute()
    await ask(old, first_batch())
    await attach(worker, 2)
    assert (await failure(old))[0] is grpc.StatusCode.FAILED_PRECONDITION
    state = await worker.DescribeDevice(worker_pb2.DescribeDeviceRequest())
    assert (state.epoch, state.num_rows_used) == (2, 0)
    assert (await ask(worker.Execute(), first_batch(epoch=2))).step_id == 1


async def test_two_batches_in_flight_are_answered_in_order(worker):
    await attach(worker)
    call = worker.Execute()
    await call.write(first_batch(blocks=(0, 1, 2)))
    await call.write(batch(2, 1))
    for step_id in range(3, 9):
        result = await call.read()
        assert (result.epoch, result.step_id) == (1, step_id - 2)
        assert list(sampled(result)) == [0]
        assert result.execute_s >= 0
        await call.write(batch(step_id, 1))
    await call.done_writing()
    assert [(await call.read()).step_id for _ in range(2)] == [7, 8]
    assert await call.read() is grpc.aio.EOF
    state = await worker.DescribeDevice(worker_pb2.DescribeDeviceRequest())
    assert (state.epoch, state.step_id, state.num_rows_used) == (1, 8, 1)


async def test_a_wrong_number_of_decodes_ends_the_stream_as_internal(worker):
    await attach(worker)
    call = worker.Execute()
    await ask(call, first_batch())
    await call.write(batch(2, 2))
    code, message = await failure(call)
    assert code is grpc.StatusCode.INTERNAL
    assert "num_decodes is 2, but 1 rows decode in step 2" in message
    # A scheduler that attaches after this is served.
    await attach(worker)
    assert (await ask(worker.Execute(), first_batch())).step_id == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (batch(1), "step_id is 1; it must be greater than 1"),
        (batch(2, epoch=2), "epoch is 2, which has not attached; 1 has"),
        (batch(2, released_rows=[4]), "released_rows[0] is 4; it must be in [0, 3]"),
        (batch(2, released_rows=[2]), "released_rows has 2, which is free"),
        (batch(2, new=[sequence(0)]), "new_sequences.row is 0, which is in use"),
        (
            batch(2, appended_rows=[0], appended_block_ids=[12]),
            "appended_block_ids[0] is 12; it must be in [0, 11]",
        ),
        (
            with_moves(batch(2, 1), disk_store=([6], [0])),
            "kv_commands.disk_store_src_block_ids[0] is 6; it must be in [0, 5]",
        ),
        (
            with_moves(batch(2, 1), disk_load=([5], [0])),
            "kv_commands.disk_load_src_block_ids[0] is 5; it must be in [0, 4]",
        ),
        (
            batch(2, new=[sequence(1, tokens=[1] * 9, blocks=[1, 2])]),
            "new_sequences.block_ids has 2 entries; it must have 3 to 8",
        ),
        (batch(2, 1, chunk_rows=[1], chunk_lens=[1]), "chunk_rows has 1, which is free"),
        (
            batch(2, 1, chunk_rows=[0], chunk_lens=[1]),
            "chunk_rows has 0, which decodes",
        ),
        (
            batch(
                2,
                1,
                new=[sequence(1, tokens=[1] * 16, blocks=(1, 2, 3, 4), total=20)],
                chunk_rows=[1],
                chunk_lens=[16],
            ),
            "chunk_lens makes 17 tokens with the decodes; a step computes at most 16",
        ),
    ],
)
async def test_a_bad_batch_ends_the_stream_by_field(worker, bad, message):
    await attach(worker)
    call = worker.Execute()
    await ask(call, first_batch())
    await call.write(bad)
    code, details = await failure(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(message)


async def test_a_table_that_is_too_short_ends_the_stream(worker):
    await attach(worker)
    call = worker.Execute()
    await ask(call, first_batch())
    await ask(call, batch(2, 1))  # the step computes the last slot of the block
    await call.write(batch(3, 1))
    code, details = await failure(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "its block table is too short" in details
