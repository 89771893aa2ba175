"""What every worker samples, for which rows, and when it ends them."""

from worker_calls import (
    PROMPT,
    VOCAB_SIZE,
    ask,
    attach,
    batch,
    first_batch,
    run_alone,
    sampled,
    sequence,
    stopped,
)

from contract.codec.packing import pack_int32
from quire.v1 import worker_pb2


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
    # Both run in one step, because a step stores all KV before it reads any.
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
