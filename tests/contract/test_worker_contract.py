"""What every worker does that speaks worker.proto, the real one and the simulated one alike."""

import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path

import grpc
import grpc.aio
import pytest

from gpu_worker.server import WorkerService
from gpu_worker.step import Limits
from gpu_worker.worker_info import WorkerInfo
from quire.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from rpc.channel import open_channel
from rpc.packing import pack_int32, unpack_int32
from rpc.status import ErrorInterceptor

VOCAB_SIZE = 97
LIMITS = Limits(
    max_num_seqs=4,
    max_model_len=32,
    max_num_batched_tokens=16,
    num_blocks=12,
    block_size=4,
    vocab_size=VOCAB_SIZE,
    num_host_blocks=6,
    num_disk_blocks=5,
)
MAX_BLOCKS = 20
INFO = WorkerInfo("w0", "cpu", "fake", LIMITS, (96,), 64, "float32", max_num_blocks=MAX_BLOCKS)
PROMPT = [5, 6, 7]
FAKE_MODEL = Path(__file__).parents[1] / "unit" / "gpu_worker"


@contextlib.asynccontextmanager
async def real_steps():
    """The worker's own step loop and executor; the model is the unit tests' fake one."""
    sys.path.insert(0, str(FAKE_MODEL))
    try:
        from fake_model import FakeModel, FakePool  # noqa: PLC0415 - they need torch
    finally:
        sys.path.remove(str(FAKE_MODEL))
    from torch import device, uint8  # noqa: PLC0415

    from gpu_worker.disk_pool import DiskPool  # noqa: PLC0415
    from gpu_worker.executor import Executor  # noqa: PLC0415
    from gpu_worker.host_pool import HostPool  # noqa: PLC0415
    from gpu_worker.step_loop import StepLoop  # noqa: PLC0415

    pool = FakePool(LIMITS.num_blocks, LIMITS.block_size, MAX_BLOCKS)
    blocks = pool.slots.view(MAX_BLOCKS, -1).view(uint8)
    host = HostPool(blocks, LIMITS.num_host_blocks, has_checksums=True)
    disk = DiskPool(host.blocks, LIMITS.num_disk_blocks, Path(tempfile.gettempdir()))
    executor = Executor(
        FakeModel(), pool, LIMITS, (96,), device("cpu"), host_pool=host, disk_pool=disk
    )
    steps = StepLoop(executor, asyncio.get_running_loop())
    yield steps
    await steps.stop()


@contextlib.asynccontextmanager
async def simulated_steps():
    from sim_worker.steps import SimulatedSteps  # noqa: PLC0415 - as the other
    from sim_worker.time_model import TimeModel  # noqa: PLC0415

    yield SimulatedSteps(
        LIMITS,
        eos_token_ids=(96,),
        mean_output_len=None,
        time_model=TimeModel(1e9, 1000, 1e12, 1e14, 1e9, 1e6),
        speedup=10.0,
        block_bytes=INFO.block_bytes,
    )


@pytest.fixture(params=[real_steps, simulated_steps], ids=["real", "simulated"])
async def worker(request, tmp_path):
    async with request.param() as steps:
        service = WorkerService()
        service.open(INFO, steps)
        server = grpc.aio.server(interceptors=[ErrorInterceptor()])
        service.service().add(server)
        server.add_insecure_port(f"unix:{tmp_path}/worker.sock")
        await server.start()
        try:
            async with open_channel(f"unix:{tmp_path}/worker.sock") as channel:
                yield worker_pb2_grpc.WorkerServiceStub(channel)
        finally:
            await server.stop(0)


async def attach(worker, epoch=1):
    return await worker.Attach(worker_pb2.AttachRequest(epoch=epoch))


def batch(step_id, num_decodes=0, *, epoch=1, new=(), **arrays):
    return worker_pb2.StepBatch(
        epoch=epoch,
        step_id=step_id,
        num_decodes=num_decodes,
        new_sequences=new,
        **{name: pack_int32(values) for name, values in arrays.items()},
    )


def with_moves(message, **moves):
    """Add moves of KV to a batch: `swap_out=([1], [2])` copies device block 1 to host block 2."""
    for kind, (src, dst) in moves.items():
        setattr(message.kv_commands, f"{kind}_src_block_ids", pack_int32(src))
        setattr(message.kv_commands, f"{kind}_dst_block_ids", pack_int32(dst))
    return message


def disk_ends(result):
    """What a result says has ended: stored, not stored, loaded, not loaded."""
    fields = (
        "stored_disk_block_ids",
        "failed_disk_block_ids",
        "loaded_host_block_ids",
        "failed_host_block_ids",
    )
    return [unpack_int32(getattr(result, field), field).tolist() for field in fields]


async def ask_until_ended(call, message, num_moves):
    """Send a batch that computes nothing and, while its disk moves go on, empty ones.

    Gives all ends, and the next step. Each result tells of an end: none comes before there is one.
    """
    ends, step_id = [[], [], [], []], message.step_id
    while True:
        news = disk_ends(await ask(call, message))
        assert any(news)
        ends = [sorted(known + new) for known, new in zip(ends, news, strict=True)]
        step_id += 1
        if sum(map(len, ends)) == num_moves:
            return ends, step_id
        message = batch(step_id)


def sequence(row=0, tokens=PROMPT, blocks=(0,), computed=0, total=12, index=0, **sampling):
    return worker_pb2.NewSequence(
        seq_id=1 + row,
        row=row,
        token_ids=pack_int32(tokens),
        num_prompt_tokens=len(tokens),
        num_computed_tokens=computed,
        block_ids=pack_int32(blocks),
        sampling=common_pb2.SamplingParams(**{"seed": 1, "temperature": 0, **sampling}),
        max_total_tokens=total,
        output_index=index,
    )


def first_batch(step_id=1, *, epoch=1, **changes):
    return batch(
        step_id, epoch=epoch, new=[sequence(**changes)], chunk_rows=[0], chunk_lens=[len(PROMPT)]
    )


async def ask(call, message):
    """Send a batch and take its result."""
    await call.write(message)
    return await call.read()


def sampled(result):
    """Row to token."""
    rows = unpack_int32(result.sampled_rows, "sampled_rows").tolist()
    tokens = unpack_int32(result.sampled_token_ids, "sampled_token_ids").tolist()
    return dict(zip(rows, tokens, strict=True))


def stopped(result):
    return unpack_int32(result.stopped_rows, "stopped_rows").tolist()


async def failure(call):
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code(), await call.details()


async def run_alone(worker, epoch, num_steps=8, **changes):
    """Give the tokens of one sequence that runs alone, with blocks as it grows."""
    await attach(worker, epoch)
    call = worker.Execute()
    tokens = list(sampled(await ask(call, first_batch(epoch=epoch, **changes))).values())
    for step_id in range(2, num_steps + 1):
        position = len(PROMPT) + step_id - 2
        grown = {}
        if position % LIMITS.block_size == 0:
            grown = {
                "appended_rows": [0],
                "appended_block_ids": [position // LIMITS.block_size],
            }
        result = await ask(call, batch(step_id, 1, epoch=epoch, **grown))
        tokens += sampled(result).values()
    call.cancel()
    return tokens


async def held(worker, epoch):
    """All parts of what the worker holds, as one."""
    whole = worker_pb2.ReadHoldingsResponse()
    async for part in worker.ReadHoldings(worker_pb2.ReadHoldingsRequest(epoch=epoch)):
        whole.MergeFrom(part)
    return whole


async def test_the_next_scheduler_goes_on_where_the_one_before_was(worker):
    """The KV stays in its blocks, under their labels; the tokens come out as they would have."""
    expected = await run_alone(worker, 1, num_steps=6)
    await attach(worker, 2)
    call = worker.Execute()
    first = first_batch(epoch=2, blocks=(0, 1, 2))
    first.new_sequences[0].identity = b"i" * 32
    await ask(call, first)
    message = batch(2, 1, epoch=2, labelled_block_ids=[0, 5, 9])
    message.labels = b"a" * 32 + b"b" * 32 + b"c" * 32
    message = with_moves(message, copy=([5], [6]))
    await ask(call, message)
    await ask(call, batch(3, 1, epoch=2))
    await attach(worker, 3)
    whole = await held(worker, 3)
    (row,) = whole.rows
    tokens = unpack_int32(row.token_ids, "token_ids").tolist()
    assert tokens == [*PROMPT, *expected[:3]]
    assert row.num_computed_tokens == len(tokens) - 1
    labels = whole.device.labels
    blocks = unpack_int32(whole.device.block_ids, "block_ids").tolist()
    named = {block: labels[32 * i] for i, block in enumerate(blocks)}
    assert {b: named.get(b) for b in (5, 6, 9)} == {5: ord("b"), 6: ord("b"), 9: ord("c")}
    call = worker.Execute()
    again = sequence(tokens=tokens, blocks=(0, 1, 2), computed=len(tokens) - 1)
    again.num_prompt_tokens = len(PROMPT)
    result = await ask(call, batch(1, epoch=3, new=[again], chunk_rows=[0], chunk_lens=[1]))
    assert sampled(result) == {0: expected[3]}


async def test_attach_tells_the_worker(worker):
    info = (await attach(worker)).worker
    assert (info.worker_id, info.model.id, info.model.vocab_size) == ("w0", "fake", VOCAB_SIZE)
    assert (info.num_blocks, info.block_size, info.max_num_seqs) == (12, 4, 4)
    assert info.model.eos_token_ids == [96]


async def resize(worker, num_blocks, epoch=1):
    request = worker_pb2.ResizePoolRequest(epoch=epoch, num_blocks=num_blocks)
    return await worker.ResizePool(request)


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


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
            assert details == "num_blocks is 18; row 0 has a block of a higher number"
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
    await resize(worker, 12, epoch=5)  # as it is


async def test_epoch_zero_may_not_attach(worker):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await attach(worker, 0)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


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


async def test_the_same_seed_gives_the_same_tokens(worker):
    first = await run_alone(worker, 1, temperature=1.0)
    assert await run_alone(worker, 2, temperature=1.0) == first
    assert len(first) == 8
    assert all(0 <= token < VOCAB_SIZE for token in first)


async def test_an_output_draws_with_its_index_added_to_the_seed(worker):
    output = await run_alone(worker, 1, temperature=1.0, seed=4, index=3)
    assert await run_alone(worker, 2, temperature=1.0, seed=7) == output
    assert await run_alone(worker, 3, temperature=1.0, seed=4) != output


async def test_a_sequence_that_is_resumed_goes_on_as_it_would_have(worker):
    output = await run_alone(worker, 1, temperature=1.0)
    await attach(worker, 2)
    call = worker.Execute()
    known = PROMPT + output[:4]
    new = sequence(tokens=known, blocks=(5, 6), temperature=1.0)
    new.num_prompt_tokens = len(PROMPT)
    message = batch(1, epoch=2, new=[new], chunk_rows=[0], chunk_lens=[len(known)])
    assert sampled(await ask(call, message)) == {0: output[4]}


async def test_a_chunk_that_is_not_the_last_samples_nothing(worker):
    await attach(worker)
    call = worker.Execute()
    await call.write(batch(1, new=[sequence()], chunk_rows=[0], chunk_lens=[2]))
    assert sampled(await call.read()) == {}
    assert list(sampled(await ask(call, batch(2, chunk_rows=[0], chunk_lens=[1])))) == [0]


async def test_a_row_decodes_until_its_length_without_being_named(worker):
    await attach(worker)
    call = worker.Execute()
    await ask(call, first_batch(total=5, blocks=(0, 1)))
    assert list(sampled(await ask(call, batch(2, 1)))) == [0]
    assert sampled(await ask(call, batch(3, 0))) == {}


async def test_a_stop_token_ends_a_row_that_goes_on_in_name(worker):
    output = await run_alone(worker, 1, temperature=1.0)
    place = next(i for i in range(1, 8) if output[i] not in output[:i])
    await attach(worker, 2)
    call = worker.Execute()
    new = {"stop_token_ids": [output[place]], "temperature": 1.0, "blocks": (0, 1, 2)}
    result = await ask(call, first_batch(epoch=2, **new))
    for step_id in range(2, place + 2):
        assert stopped(result) == []
        result = await ask(call, batch(step_id, 1, epoch=2))
    assert (sampled(result), stopped(result)) == ({0: output[place]}, [0])
    result = await ask(call, batch(place + 2, 1, epoch=2))
    assert (sampled(result), stopped(result)) == ({}, [])
    await ask(call, batch(place + 3, 0, epoch=2, released_rows=[0]))
    state = await worker.DescribeDevice(worker_pb2.DescribeDeviceRequest())
    assert state.num_rows_used == 0


async def test_end_tokens_are_suppressed_until_min_tokens(worker):
    output = await run_alone(worker, 1)
    suppressed = {"stop_token_ids": [output[0]], "min_tokens": 3}
    assert (await run_alone(worker, 2, **suppressed))[0] != output[0]


async def test_log_probabilities_come_for_the_rows_that_ask(worker):
    await attach(worker)
    call = worker.Execute()
    new = [sequence(0), sequence(1, blocks=(1,), logprobs=3)]
    result = await ask(call, batch(1, new=new, chunk_rows=[0, 1], chunk_lens=[3, 3]))
    (logprob,) = result.logprobs
    assert list(sampled(result))[logprob.index] == 1
    assert len(logprob.logprob.top_token_ids) == len(logprob.logprob.top_logprobs) == 3
    assert logprob.logprob.logprob <= 0


async def test_a_released_row_and_its_blocks_can_be_had_in_the_same_step(worker):
    await attach(worker)
    call = worker.Execute()
    await ask(call, first_batch())
    again = batch(2, released_rows=[0], new=[sequence()], chunk_rows=[0], chunk_lens=[3])
    assert list(sampled(await ask(call, again))) == [0]


async def test_a_block_found_in_the_prefix_cache_is_shared(worker):
    await attach(worker)
    call = worker.Execute()
    tokens = [1, 2, 3, 4, 5]
    leader = sequence(0, tokens=tokens, blocks=(0, 1))
    follower = sequence(1, tokens=tokens, blocks=(0, 2), computed=4)
    # In the same step: all KV of a step is stored before any is read.
    both = batch(1, new=[leader, follower], chunk_rows=[0, 1], chunk_lens=[5, 1])
    result = sampled(await ask(call, both))
    assert result[0] == result[1]


async def test_a_fork_starts_with_a_copy_of_the_partial_block(worker):
    await attach(worker)
    call = worker.Execute()
    parent = sampled(await ask(call, first_batch(blocks=(3,))))[0]
    message = batch(
        2, 1, new=[sequence(1, blocks=(4,), computed=2)], chunk_rows=[1], chunk_lens=[1]
    )
    message.kv_commands.copy_src_block_ids = pack_int32([3])
    message.kv_commands.copy_dst_block_ids = pack_int32([4])
    assert sampled(await ask(call, message))[1] == parent


TWO_BLOCKS = [5, 6, 7, 8, 9, 10]
"""A prompt with a block and a partial one."""


async def start_and_swap_out(worker):
    """Run a sequence for two tokens and swap it out of blocks 3 and 1, to 0 and 1.

    Another one gets its blocks in the very step. Gives the call and the two tokens.
    """
    await attach(worker)
    call = worker.Execute()
    new = sequence(tokens=TWO_BLOCKS, blocks=(3, 1), temperature=1.0)
    tokens = list(
        sampled(await ask(call, batch(1, new=[new], chunk_rows=[0], chunk_lens=[6]))).values()
    )
    tokens += sampled(await ask(call, batch(2, 1))).values()
    other = sequence(1, tokens=[9] * 8, blocks=(1, 3), total=9)
    taking = batch(3, released_rows=[0], new=[other], chunk_rows=[1], chunk_lens=[8])
    await ask(call, with_moves(taking, swap_out=([3, 1], [0, 1])))
    return call, tokens


async def resume(call, step_id, tokens, blocks):
    """Announce the sequence with all of its tokens but one computed; give the next token."""
    new = sequence(2, tokens=TWO_BLOCKS + tokens, blocks=blocks, computed=7, temperature=1.0)
    new.num_prompt_tokens = len(TWO_BLOCKS)
    message = batch(step_id, new=[new], chunk_rows=[2], chunk_lens=[1])
    return sampled(await ask(call, message))[2]


async def third_token(worker, epoch):
    """What the sequence draws if nothing moves."""
    await attach(worker, epoch)
    call = worker.Execute()
    new = sequence(tokens=TWO_BLOCKS, blocks=(0, 2, 4), temperature=1.0)
    await ask(call, batch(1, epoch=epoch, new=[new], chunk_rows=[0], chunk_lens=[6]))
    await ask(call, batch(2, 1, epoch=epoch))
    (token,) = sampled(await ask(call, batch(3, 1, epoch=epoch))).values()
    return token


async def test_a_swapped_sequence_goes_on_as_it_would_have(worker):
    call, tokens = await start_and_swap_out(worker)
    result = await ask(call, with_moves(batch(4), swap_in=([1, 0], [6, 5])))
    assert result.failed_swap_in_block_ids == b""
    token = await resume(call, 5, tokens, blocks=(5, 6))
    assert token == await third_token(worker, 2)


async def test_a_sequence_comes_back_from_the_disk_as_it_would_have(worker):
    call, tokens = await start_and_swap_out(worker)
    # The very step that stores its host blocks gives them to another's.
    storing = with_moves(batch(4), swap_out=([1, 3], [0, 1]), disk_store=([0, 1], [4, 2]))
    ends, step_id = await ask_until_ended(call, storing, 2)
    assert ends == [[2, 4], [], [], []]
    loading = with_moves(batch(step_id), disk_load=([2, 4], [5, 0]))
    ends, step_id = await ask_until_ended(call, loading, 2)
    assert ends == [[], [], [0, 5], []]
    await ask(call, with_moves(batch(step_id), swap_in=([0, 5], [7, 8])))
    token = await resume(call, step_id + 1, tokens, blocks=(7, 8))
    assert token == await third_token(worker, 2)


async def test_steps_that_compute_do_not_wait_for_the_disk(worker):
    call, _ = await start_and_swap_out(worker)
    new = sequence(2, tokens=[1, 2], blocks=(6,), total=6)
    moving = batch(4, new=[new], chunk_rows=[2], chunk_lens=[2])
    news = disk_ends(await ask(call, with_moves(moving, disk_store=([0, 1, 0], [0, 1, 2]))))
    for step_id in range(5, 7):
        more = disk_ends(await ask(call, batch(step_id, 1)))
        news = [known + new for known, new in zip(news, more, strict=True)]
    ends, step_id = news, 7
    while len(ends[0]) < 3:
        more = disk_ends(await ask(call, batch(step_id, 0, released_rows=[2] * (step_id == 7))))
        ends = [known + new for known, new in zip(ends, more, strict=True)]
        step_id += 1
    assert [sorted(ends[0]), *ends[1:]] == [[0, 1, 2], [], [], []]


async def test_a_new_scheduler_hears_nothing_of_the_moves_before(worker):
    call, _ = await start_and_swap_out(worker)
    await call.write(with_moves(batch(4), disk_store=([0, 1], [0, 1])))
    await attach(worker, 2)
    new_call = worker.Execute()
    assert disk_ends(await ask(new_call, batch(9, epoch=2))) == [[], [], [], []]


async def test_a_block_that_moves_is_renamed_in_all_tables(worker):
    await attach(worker)
    call = worker.Execute()
    first = sequence(tokens=TWO_BLOCKS, blocks=(3, 1), temperature=1.0)
    await ask(call, batch(1, new=[first], chunk_rows=[0], chunk_lens=[6]))
    # Block 1 goes to 4 and 3 to 1; a sequence that comes in this step names the old places too.
    sharing = sequence(1, tokens=[*TWO_BLOCKS[:4], 30], blocks=(3, 7), computed=4)
    message = batch(
        2,
        1,
        new=[sharing],
        chunk_rows=[1],
        chunk_lens=[1],
        renamed_src_block_ids=[1, 3],
        renamed_dst_block_ids=[4, 1],
    )
    await ask(call, with_moves(message, copy=([1, 3], [4, 1])))
    # Were a table wrong, this one would overwrite what the first still reads.
    other = sequence(2, tokens=[9] * 4, blocks=(3,))
    message = batch(3, 2, new=[other], chunk_rows=[2], chunk_lens=[4])
    token = sampled(await ask(call, message))[0]
    assert token == await third_token(worker, 2)


async def test_a_wrong_number_of_decodes_ends_the_stream_as_internal(worker):
    await attach(worker)
    call = worker.Execute()
    await ask(call, first_batch())
    await call.write(batch(2, 2))
    code, message = await failure(call)
    assert code is grpc.StatusCode.INTERNAL
    assert "num_decodes is 2, but 1 rows decode in step 2" in message
    # It goes on for a scheduler that starts over.
    await attach(worker)
    assert (await ask(worker.Execute(), first_batch())).step_id == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (batch(1), "step_id is 1; it must be greater than 1"),
        (batch(2, epoch=2), "epoch is 2, which has not attached; 1 has"),
        (batch(2, released_rows=[4]), "released_rows has 4; values must be in [0, 3]"),
        (batch(2, released_rows=[2]), "released_rows has 2, which is free"),
        (batch(2, new=[sequence(0)]), "new_sequences.row is 0, which is in use"),
        (
            batch(2, appended_rows=[0], appended_block_ids=[12]),
            "appended_block_ids has 12; values must be in [0, 11]",
        ),
        (
            with_moves(batch(2, 1), disk_store=([6], [0])),
            "kv_commands.disk_store_src_block_ids has 6; values must be in [0, 5]",
        ),
        (
            with_moves(batch(2, 1), disk_load=([5], [0])),
            "kv_commands.disk_load_src_block_ids has 5; values must be in [0, 4]",
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
    await ask(call, batch(2, 1))  # the last slot of its block
    await call.write(batch(3, 1))
    code, details = await failure(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "its block table is too short" in details
