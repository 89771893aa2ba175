"""Examples of long prompts: their share of a step, and short prompts that they do not delay."""

from dataclasses import replace

from policy_driver import Worker, make_core, request

from scheduler_svc.core.pacing import PromptQueue
from scheduler_svc.core.reports.load import read_prompts


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


def test_beside_decodes_prompts_compute_no_more_than_is_paced():
    core = make_core(max_num_seqs=4, max_num_batched_tokens=16, long_prefill_threshold=8)
    core.submit(request(0, num_tokens=4, max_tokens=40), 0.0)
    worker = Worker(core)
    worker.step()
    core.submit(request(1, num_tokens=40), 1.0)
    core.submit(request(2, num_tokens=6), 1.0)
    worker.max_paced_tokens = 4
    while 1 not in worker.ends:
        worker.step()
    shared = {1: 2, 2: 2}
    assert worker.chunks[1:4] == [shared] * 3, "a long one leaves half of it to short ones"
    assert [chunk[1] for chunk in worker.chunks[4:] if 1 in chunk] == [4] * 8 + [2], (
        "neither is its end computed at once"
    )


def test_a_prompt_for_which_a_paced_step_has_no_token_left_waits_without_blocks():
    core = make_core(max_num_seqs=4, max_num_batched_tokens=16)
    core.submit(request(0, num_tokens=4, max_tokens=40), 0.0)
    worker = Worker(core)
    worker.step()
    core.submit(request(1, num_tokens=8), 1.0)
    core.submit(request(2, num_tokens=8), 1.0)
    worker.max_paced_tokens = 4
    worker.step()
    assert (worker.chunks[1], worker.admitted) == ({1: 4}, [0, 1])


def test_prompts_that_could_have_their_turn_are_counted():
    core = make_core(max_num_seqs=3, max_num_batched_tokens=16, long_prefill_threshold=8)
    core.submit(request(0, num_tokens=4, max_tokens=40), 0.0)
    worker = Worker(core)
    worker.step()
    assert read_prompts(core) == PromptQueue(1, num_tokens=0, num_short_tokens=0, num_short=0)
    core.submit(request(1, num_tokens=40), 1.0)
    core.submit(request(2, num_tokens=6), 1.0)
    assert read_prompts(core) == PromptQueue(1, num_tokens=46, num_short_tokens=6, num_short=1)
    worker.max_paced_tokens = 4
    worker.step()
    assert read_prompts(core) == PromptQueue(1, num_tokens=42, num_short_tokens=4, num_short=1)
    core.submit(request(3, num_tokens=4), 1.0)
    assert read_prompts(core).num_tokens == 42, "it has no row to have"


def test_waiting_prompts_count_as_far_as_blocks_are_left():
    core = make_core(num_blocks=16, max_num_seqs=2, max_num_batched_tokens=48)
    core.submit(request(0, num_tokens=47, max_tokens=2), 0.0)
    Worker(core).step()
    assert core.pool.num_available == 4
    core.submit(request(1, num_tokens=40), 1.0)
    assert read_prompts(core).num_tokens == 4 * 4


def test_the_end_of_a_long_prompt_is_not_a_short_one():
    core = make_core(max_num_seqs=4, max_num_batched_tokens=16, long_prefill_threshold=8)
    core.submit(request(0, num_tokens=20), 0.0)
    worker = Worker(core)
    worker.step()
    assert read_prompts(core) == PromptQueue(0, num_tokens=4, num_short_tokens=0, num_short=0)


def test_a_lone_prompt_is_computed_in_parts_that_there_is_time_for():
    core = make_core(max_num_batched_tokens=16)
    core.submit(request(0, num_tokens=14), 0.0)
    worker = Worker(core)
    worker.max_prompt_tokens = 5
    worker.run()
    assert worker.chunks[:3] == [{0: 5}, {0: 5}, {0: 4}]


def test_what_there_is_time_for_bounds_short_prompts_and_what_is_paced():
    core = make_core(max_num_seqs=4, max_num_batched_tokens=16)
    worker = Worker(core)
    core.submit(request(0, num_tokens=4, max_tokens=40), 0.0)
    worker.step()
    core.submit(request(1, num_tokens=6), 1.0)
    core.submit(request(2, num_tokens=6), 1.0)
    worker.max_paced_tokens, worker.max_prompt_tokens = 12, 8
    worker.step()
    assert worker.chunks[1] == {1: 6, 2: 2}
    core.submit(request(3, num_tokens=9), 2.0)
    worker.max_paced_tokens = 5
    worker.step()
    assert worker.chunks[2] == {2: 4, 1: 1}, "the lower of both counts"


def test_a_prompt_is_long_by_what_keeps_the_device_busy():
    room = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "long_prefill_threshold": None}
    core = make_core(num_saturating_tokens=16, **room)
    for key, num_tokens in enumerate([8, 9]):
        core.submit(request(key, num_tokens=num_tokens), 0.0)
    assert read_prompts(core) == PromptQueue(0, num_tokens=17, num_short_tokens=8, num_short=1)


def test_an_output_that_forks_takes_nothing_from_prompts():
    core = make_core(max_num_seqs=4, max_num_batched_tokens=16)
    core.submit(replace(request(0, num_tokens=4, max_tokens=40), n=2), 0.0)
    worker = Worker(core)
    worker.step()
    core.submit(request(9, num_tokens=6), 1.0)
    worker.max_paced_tokens = 4
    worker.step()
    assert worker.chunks[1] == {1: 1, 2: 4}


def test_a_prompt_of_two_tokens_may_be_long():
    core = make_core(long_prefill_threshold=1)
    core.submit(request(0, num_tokens=3), 0.0)
    assert read_prompts(core) == PromptQueue(0, num_tokens=3, num_short_tokens=0, num_short=0)
    worker = Worker(core)
    worker.max_prompt_tokens = 1
    worker.step()
    assert read_prompts(core) == PromptQueue(0, num_tokens=2, num_short_tokens=0, num_short=0)


def test_without_decodes_nothing_is_paced():
    core = make_core(max_num_seqs=4, max_num_batched_tokens=16, long_prefill_threshold=8)
    core.submit(request(1, num_tokens=40), 0.0)
    worker = Worker(core)
    worker.max_paced_tokens = 3
    worker.step()
    assert worker.chunks == [{0: 16}]
