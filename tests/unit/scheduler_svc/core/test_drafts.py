"""A worker that drafts: only the result of a step tells how many tokens it yielded."""

import pytest
from core_driver import ROUTER, answer, chunks, grown, make_core, new, outs, schedule, submit

from scheduler_svc.core.interface.errors import DeadlineError
from scheduler_svc.core.interface.request import FinishReason
from scheduler_svc.core.limits.acceptance import WorkerRates

K = 3
PROMPT = [1, 2, 3, 4, 5]


def started(num_blocks=16, max_tokens=10, **more):
    """A core with one sequence in row 0 whose prompt is computed, and a step in flight."""
    core = make_core(num_blocks, num_draft_tokens=K)
    submit(core, 1, PROMPT, max_tokens=max_tokens, **more)
    first = schedule(core)
    assert (new(first), chunks(first)) == ([(0, 0, [0, 1])], {0: 5})
    second = schedule(core)
    answer(core, first, 0)
    return core, second


def test_blocks_come_ahead_of_what_the_steps_in_flight_may_bring():
    core, second = started()
    assert grown(second) == {0: 2}  # 5 known, 1 + 3 from the step in flight, 3 guesses: 12 slots
    third = schedule(core)
    assert grown(third) == {0: 3}  # 6 + 4 + 3
    answer(core, second, 0, 0, 0)
    fourth = schedule(core)
    assert grown(fourth) == {}  # 9 + 4 + 3, but its last token, the 15th, needs no slot
    assert third.num_decodes == fourth.num_decodes == 1


def test_a_result_brings_several_tokens_in_order():
    core, second = started()
    events = answer(core, second, 0, 0, 0)
    assert events.token_ids.tolist() == [7, 7, 7]
    assert events.seq_keys.tolist() == [1, 1, 1]
    assert events.result_index.tolist() == [0, 1, 2]
    assert core.rows.num_tokens(0) == 9


def test_tokens_of_several_rows_are_distinguished():
    core = make_core(num_draft_tokens=K)
    submit(core, 1, PROMPT)
    submit(core, 2, [9, 8])
    first = schedule(core)
    answer(core, first, 0, 1)
    events = answer(core, schedule(core), 0, 1, 1, 1)
    assert events.seq_keys.tolist() == [1, 2, 2, 2]
    assert [core.rows.num_tokens(row) for row in (0, 1)] == [7, 6]
    plan = schedule(core)
    core.cancel(ROUTER, [1])
    events = answer(core, plan, 0, 1, 1)
    assert events.seq_keys.tolist() == [2, 2]
    assert core.rows.tokens(1).tolist() == [9, 8] + [7] * 6


def test_a_single_draft_token_may_be_accepted():
    core = make_core(num_draft_tokens=1)
    submit(core, 1, PROMPT)
    answer(core, schedule(core), 0)
    answer(core, schedule(core), 0, 0)
    assert core.rows.tokens(0).tolist() == [*PROMPT, 7, 7, 7]


def test_a_sequence_ends_with_the_result_that_has_its_last_token():
    core, second = started(max_tokens=6)
    third = schedule(core)
    assert not answer(core, second, 0, 0, 0, 0).finished
    fourth = schedule(core)
    (finished,) = answer(core, third, 0).finished
    assert (finished.reason, fourth.num_decodes) == (FinishReason.LENGTH, 1)
    last = schedule(core)  # only this step releases the row at the worker
    assert (last.num_decodes, last.released_rows.tolist()) == (0, [0])
    answer(core, fourth)
    answer(core, last)
    assert core.load().num_free_blocks + core.load().num_cached_blocks == 16


def test_one_token_needs_no_decode():
    core = make_core(num_draft_tokens=K)
    submit(core, 1, PROMPT, max_tokens=1)
    first = schedule(core)
    assert core.schedule(0.0) is None
    (finished,) = answer(core, first, 0).finished
    assert finished.reason is FinishReason.LENGTH


def test_one_token_that_is_cancelled_does_not_come():
    core = make_core(num_draft_tokens=K)
    submit(core, 1, PROMPT, max_tokens=1)
    plan = schedule(core)
    core.cancel(0, [1])
    assert not answer(core, plan, 0).finished


def test_a_block_is_evicted_when_the_next_two_steps_may_need_it():
    core = make_core(4, block_size=8, num_host_blocks=4, num_draft_tokens=1)
    submit(core, 0, [1] * 25, max_tokens=1)
    answer(core, schedule(core), 0)
    submit(core, 1, [2] * 2, max_tokens=10)
    num_demoted = []
    for _ in range(4):
        answer(core, schedule(core), 0)
        num_demoted.append(core.load().num_demoted_blocks)
    assert num_demoted == [0, 0, 1, 1]  # 4 known, two steps of 2, and a guess


def test_full_blocks_can_be_found_while_their_sequence_decodes():
    core, second = started(max_tokens=20)
    answer(core, second, 0, 0, 0)
    answer(core, schedule(core), 0)
    schedule(core)
    submit(core, 2, [*PROMPT, 7, 7, 7, 7, 7])
    assert [num_computed for _, num_computed, _ in new(schedule(core))] == [8]


@pytest.mark.parametrize(("max_tokens", "growth"), [(8, {}), (9, {0: 3})])
def test_only_the_last_token_needs_no_slot(max_tokens, growth):
    core, _ = started(max_tokens=max_tokens)  # 12 slots
    assert grown(schedule(core)) == growth


def test_a_stop_token_may_be_the_last_of_several():
    core, second = started()
    (finished,) = answer(core, second, 0, 0, stopped=[0]).finished
    assert (finished.reason, finished.stop_token_id) == (FinishReason.STOP, 7)


def test_only_what_is_known_to_be_computed_is_found():
    core, second = started()
    third = schedule(core)
    answer(core, second, 0, 0, 0)  # 9 tokens, of which 8 are computed: two blocks
    answer(core, third)
    answer(core, schedule(core))
    core.cancel(0, [1])
    submit(core, 2, [*PROMPT, 7, 7, 7, 7, 7, 7, 7, 7])
    assert new(schedule(core)) == [(0, 8, [0, 1, 2, 3])]


def test_a_sequence_that_fills_the_pool_has_room_to_its_end():
    core, step = started(num_blocks=3, max_tokens=7)
    num_tokens = 6
    while num_tokens < 12:
        following = core.schedule(0.0)
        answer(core, step, 0, 0)
        num_tokens += 2
        step = following
    assert core.load().num_preemptions == 0
    assert core.load().num_running == 0


def test_a_block_is_evicted_before_it_is_needed_while_it_can_be_demoted():
    core = make_core(4, num_host_blocks=4, num_draft_tokens=1)
    submit(core, 0, [1] * 13, max_tokens=1)
    answer(core, schedule(core), 0)
    submit(core, 1, [2], max_tokens=6)
    moves = []
    for _ in range(4):
        plan = schedule(core)
        moves.append((outs(plan), grown(plan)))
        answer(core, plan, 0)
    assert moves == [({2: 0}, {}), ({}, {}), ({}, {}), ({}, {0: 2})]


def test_tables_of_several_groups_grow_as_one_does():
    core = make_core(40, num_draft_tokens=K, kv_windows=(None, 8))
    submit(core, 1, PROMPT, max_tokens=20)
    plan = schedule(core)
    while not answer(core, plan, 0).finished:
        plan = schedule(core)
    assert core.load().num_preemptions == 0


def test_guesses_are_shorter_than_a_block():
    with pytest.raises(ValueError, match="num_draft_tokens is 4; it must be at least 0 and less"):
        make_core(block_size=4, num_draft_tokens=4)


def test_a_deadline_can_be_met_in_as_few_steps_as_guesses_may_need():
    rates = WorkerRates(prefill_tokens_per_s=1000.0, step_s=1.0)
    request = {"min_tokens": 8, "max_tokens": 8, "deadline": 3.5}
    cores = [make_core(num_draft_tokens=drafts) for drafts in (0, K)]
    requests = []
    for core in cores:
        submit(core, 1, PROMPT, **request)
        requests.append(next(iter(core.live)).request)
    with pytest.raises(DeadlineError, match="8 steps"):
        cores[0].check_deadline(requests[0], 0.0, rates)
    cores[1].check_deadline(requests[1], 0.0, rates)


def test_no_block_comes_while_known_tokens_and_guesses_fit():
    core = make_core(num_draft_tokens=K)
    submit(core, 1, PROMPT, max_tokens=10)
    answer(core, schedule(core), 0)
    plan = schedule(core)
    assert grown(plan) == {0: 2}
    answer(core, plan, 0, 0, 0)
    assert grown(schedule(core)) == {}  # 9 + 3


def test_no_block_comes_while_what_a_step_in_flight_may_bring_fits():
    core, second = started(max_tokens=20)
    third = schedule(core)
    answer(core, second, 0, 0, 0)
    assert grown(third) == {0: 3}
    assert grown(schedule(core)) == {}  # 9 + 4 + 3
    answer(core, third, 0)
    assert grown(schedule(core)) == {0: 4}  # 10 + 4 + 3
