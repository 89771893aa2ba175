"""Long prompts by example: how much of a step they get, and whom they do not hold up."""

from policy_driver import Worker, make_core, request


def test_a_long_prompt_leaves_half_of_each_step_to_short_ones():
    core = make_core(max_num_seqs=4, max_num_batched_tokens=16, long_prefill_threshold=8)
    core.submit(request(0, num_tokens=60), 0.0)
    for key in range(1, 4):
        core.submit(request(key, num_tokens=4), 1.0)
    worker = Worker(core)
    worker.step()
    assert worker.chunks[0] == {0: 8, 1: 4, 2: 4}


def test_what_short_ones_leave_a_long_prompt_gets():
    core = make_core(max_num_seqs=4, max_num_batched_tokens=16, long_prefill_threshold=8)
    core.submit(request(0, num_tokens=60), 0.0)
    core.submit(request(1, num_tokens=3), 1.0)
    worker = Worker(core)
    worker.step()
    worker.step()
    assert worker.chunks[:2] == [{0: 13, 1: 3}, {0: 16}]


def test_what_is_left_over_does_not_exceed_the_largest_chunk():
    core = make_core(max_num_batched_tokens=16, long_prefill_threshold=8, max_prefill_chunk=10)
    core.submit(request(0, num_tokens=60), 0.0)
    worker = Worker(core)
    worker.step()
    assert worker.chunks == [{0: 10}]


def test_short_prompts_overtake_a_long_one_that_waits_for_another():
    core = make_core(max_num_seqs=4, max_num_batched_tokens=16, long_prefill_threshold=8)
    core.submit(request(0, num_tokens=60), 0.0)
    core.submit(request(1, num_tokens=40), 1.0)
    core.submit(request(2, num_tokens=4), 2.0)
    worker = Worker(core)
    assert worker.run() == [0, 2, 1]


def test_two_long_prompts_at_once_if_so_many_are_allowed():
    core = make_core(
        max_num_seqs=4, max_num_batched_tokens=16, long_prefill_threshold=8, max_long_prefills=2
    )
    core.submit(request(0, num_tokens=60), 0.0)
    core.submit(request(1, num_tokens=40), 1.0)
    worker = Worker(core)
    worker.step()
    assert set(worker.chunks[0]) == {0, 1}


def test_a_stream_of_short_prompts_does_not_hold_up_a_long_one():
    core = make_core(max_num_seqs=4, max_num_batched_tokens=16, long_prefill_threshold=8)
    core.submit(request(0, num_tokens=60), 0.0)
    worker = Worker(core)
    for key in range(1, 100):
        core.submit(request(2 * key, num_tokens=8), 1.0)
        core.submit(request(2 * key + 1, num_tokens=8), 1.0)
        worker.step()
        if 0 in worker.ends:
            break
    assert key <= 60 / 8 + 2, "at least half of each step is its"


def test_a_long_prompt_that_is_cached_waits_for_no_other():
    core = make_core(max_num_seqs=4, max_num_batched_tokens=16, long_prefill_threshold=8)
    core.submit(request(1, num_tokens=40), 0.0)
    worker = Worker(core)
    worker.run()
    core.submit(request(0, num_tokens=60), 1.0)
    core.submit(request(1, num_tokens=44), 2.0)
    worker.step()
    assert worker.admitted == [1, 0, 1]


def test_beside_decodes_a_long_prompt_computes_no_more_than_is_paced():
    core = make_core(max_num_seqs=4, max_num_batched_tokens=16, long_prefill_threshold=8)
    core.submit(request(0, num_tokens=4, max_tokens=40), 0.0)
    worker = Worker(core)
    worker.step()
    core.submit(request(1, num_tokens=40), 1.0)
    core.submit(request(2, num_tokens=6), 1.0)
    worker.max_paced_tokens = 3
    while 1 not in worker.ends:
        worker.step()
    assert worker.chunks[1] == {1: 3, 2: 6}, "a short one is not held back"
    assert [chunk[1] for chunk in worker.chunks[1:] if 1 in chunk] == [3] * 13 + [1], (
        "neither is its end computed at once"
    )


def test_nobody_decodes_and_nothing_is_paced():
    core = make_core(max_num_seqs=4, max_num_batched_tokens=16, long_prefill_threshold=8)
    core.submit(request(1, num_tokens=40), 0.0)
    worker = Worker(core)
    worker.max_paced_tokens = 3
    worker.step()
    assert worker.chunks == [{0: 16}]
