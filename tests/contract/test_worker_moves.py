"""The behaviour of every worker when KV moves between tiers and within the device."""

from worker_calls import (
    TWO_BLOCKS,
    ask,
    ask_until_ended,
    attach,
    batch,
    disk_ends,
    sampled,
    sequence,
    with_moves,
)


async def start_and_swap_out(worker):
    """Run a sequence for two tokens and swap it out of blocks 3 and 1, to 0 and 1.

    Another sequence gets its blocks in the same step. Returns the call and the two tokens.
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
    """Announce the sequence with all but its last token computed; return its next token."""
    new = sequence(2, tokens=TWO_BLOCKS + tokens, blocks=blocks, computed=7, temperature=1.0)
    new.num_prompt_tokens = len(TWO_BLOCKS)
    message = batch(step_id, new=[new], chunk_rows=[2], chunk_lens=[1])
    return sampled(await ask(call, message))[2]


async def third_token(worker, epoch):
    """The sequence's third token if nothing moves."""
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
    # One step stores the sequence's host blocks and reuses them for another sequence.
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


async def test_a_new_scheduler_gets_no_reports_of_earlier_moves(worker):
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
    # Block 1 moves to 4, and 3 to 1. A sequence that is new in this step also names the old blocks.
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
    # If the worker kept the old table, this sequence would overwrite KV that the first one reads.
    other = sequence(2, tokens=[9] * 4, blocks=(3,))
    message = batch(3, 2, new=[other], chunk_rows=[2], chunk_lens=[4])
    token = sampled(await ask(call, message))[0]
    assert token == await third_token(worker, 2)
