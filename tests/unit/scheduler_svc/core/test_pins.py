"""Examples of pins: the blocks that stay cached, for how long, and when pins are given up."""

import numpy as np
import pytest
from core_driver import ROUTER, answer, make_core, new, schedule, submit

from scheduler_svc.core.interface.events import Pinned
from scheduler_svc.core.interface.request import OutputSoFar, SeqKey
from scheduler_svc.core.invariants import check

A, B, C = range(8), range(50, 58), range(100, 108)


def run(core, key, prompt, now=0.0, **options) -> list[int]:
    """Run a request of one token to its end; return the pinned tokens of each prompt."""
    submit(core, key, prompt, max_tokens=1, **options)
    pinned = []
    while core.load().num_running + core.load().num_waiting:
        plan = schedule(core, now)
        rows = [row for row in plan.chunk_rows.tolist() if row in range(8)]
        pinned += [pin.num_tokens for pin in answer(core, plan, *rows).pinned]
    answer(core, schedule(core, now))
    return pinned


def num_found(core, prompt) -> int:
    return core.lookup.num_cached_tokens(make_request(prompt))


def make_request(prompt):
    core = make_core()
    submit(core, 0, [*prompt, 9])
    return next(iter(core.live)).request


def test_a_pinned_prompt_outlives_newer_ones_until_its_time_has_passed():
    core = make_core(num_blocks=4, max_pinned_share=0.5)
    assert run(core, 0, A, cache_pin_s=10.0) == [8]
    run(core, 1, B)
    assert run(core, 2, C) == []
    assert (num_found(core, A), num_found(core, B), num_found(core, C)) == (8, 0, 8)
    load = core.load()
    assert (load.num_pinned_blocks, load.num_cached_blocks) == (2, 2)
    core.schedule(now=9.9)
    assert core.load().num_pinned_blocks == 2
    core.schedule(now=10.0)
    check(core)
    assert (core.load().num_pinned_blocks, core.load().num_cached_blocks) == (0, 4)


def test_a_pin_above_the_quota_pins_the_beginning():
    core = make_core(num_blocks=8, max_pinned_share=0.25)
    assert run(core, 0, range(20), cache_pin_s=10.0) == [8]
    assert core.load().num_pinned_blocks == 2
    assert run(core, 1, B, cache_pin_s=10.0, tenant="other") == [0], "one quota for all"
    assert run(core, 2, A, cache_pin_s=10.0) == [8], "it is pinned already"


def test_a_partial_block_is_not_pinned():
    core = make_core()
    assert run(core, 0, range(7), cache_pin_s=10.0) == [4]
    assert run(core, 1, [1, 2, 3], cache_pin_s=10.0) == [0]


def test_more_than_is_pinned_can_be_asked_for():
    core = make_core()
    run(core, 0, A, cache_pin_s=10.0)
    assert core.pins.give_up(5), "there were some"
    check(core)
    assert core.load().num_pinned_blocks == 0
    assert not core.pins.give_up(1)


def test_of_a_request_that_comes_back_with_output_the_prompt_is_pinned_and_no_more():
    core = make_core()
    outputs = (OutputSoFar(np.arange(9, dtype=np.int32), finished=False),)
    submit(core, 1, A, max_tokens=12, cache_pin_s=10.0, outputs=outputs)
    events = answer(core, schedule(core), 0)
    assert events.pinned == (Pinned(ROUTER, SeqKey(1), 8),)
    assert core.load().num_pinned_blocks == 2


def test_pinning_again_extends_and_never_shortens():
    core = make_core(max_pinned_share=1.0)
    run(core, 0, A, cache_pin_s=10.0)
    run(core, 1, [*A, 9], now=5.0, cache_pin_s=10.0)
    run(core, 2, [*A, 9], now=6.0, cache_pin_s=1.0)
    core.schedule(now=14.0)
    assert core.load().num_pinned_blocks == 2
    core.schedule(now=15.0)
    assert core.load().num_pinned_blocks == 0


def test_several_outputs_pin_their_prompt_once():
    core = make_core(max_pinned_share=0.5)
    submit(core, 0, [*A, 1, 2], n=3, max_tokens=2, cache_pin_s=10.0)
    first = schedule(core)
    assert [pin.num_tokens for pin in answer(core, first, 0).pinned] == [8]
    schedule(core)
    assert core.load().num_pinned_blocks == 2
    core.cancel(ROUTER, [0, 1, 2])
    check(core)
    assert core.load().num_pinned_blocks == 2


def generate(core, key, prompt, num, **options):
    """Run a request that makes `num` tokens, one a second; return all its tokens."""
    submit(core, key, prompt, max_tokens=num, **options)
    tokens = [*prompt]
    for now in range(num):
        events = answer(core, schedule(core, float(now)), 0)
        tokens += events.token_ids.tolist()
    answer(core, schedule(core, float(num)))
    check(core)
    return tokens


def test_a_completed_output_is_pinned_with_its_prompt():
    core = make_core(max_pinned_share=1.0)
    tokens = generate(core, 0, A, 6, cache_pin_s=10.0)
    assert len(tokens) == 14
    assert core.load().num_pinned_blocks == 3
    run(core, 1, B, now=14.0)
    assert (core.load().num_pinned_blocks, num_found(core, tokens)) == (3, 12)
    core.schedule(now=15.0)  # 10 s after the last step was planned
    assert core.load().num_pinned_blocks == 0


def test_several_completed_outputs_are_not_pinned():
    core = make_core(max_pinned_share=1.0)
    submit(core, 0, [*A, 1, 2], n=2, max_tokens=6, cache_pin_s=10.0)
    answer(core, schedule(core), 0)
    while core.running:
        answer(core, schedule(core), 0, 1)
    assert core.load().num_pinned_blocks == 2


def test_an_output_is_unpinned_with_its_request():
    core = make_core(max_pinned_share=1.0)
    generate(core, 0, A, 6, cache_pin_s=10.0)
    core.unpin("", "request-0")
    check(core)
    assert core.load().num_pinned_blocks == 0


def test_an_output_that_was_cancelled_or_has_no_room_is_not_pinned():
    core = make_core(max_pinned_share=1.0)
    submit(core, 0, A, max_tokens=9, cache_pin_s=10.0)
    for _ in range(6):
        answer(core, schedule(core), 0)
    core.cancel(ROUTER, [0])
    check(core)
    assert core.load().num_pinned_blocks == 2
    core = make_core(num_blocks=8, max_pinned_share=0.25)
    generate(core, 0, A, 6, cache_pin_s=10.0)
    assert core.load().num_pinned_blocks == 2


def test_pins_go_when_nothing_runs_and_the_first_that_waits_does_not_fit():
    core = make_core(num_blocks=4, max_pinned_share=1.0)
    run(core, 0, A, cache_pin_s=10.0)
    run(core, 1, B, cache_pin_s=5.0)
    submit(core, 2, range(100, 109), max_tokens=1)
    plan = schedule(core, now=1.0)
    assert [blocks for _, _, blocks in new(plan)] == [[3, 2, 1]]
    assert core.load().num_pinned_blocks == 1, "those that end first go, the tail before the head"
    assert (num_found(core, A), num_found(core, B)) == (4, 0)


def test_pins_go_when_nobody_else_can_be_preempted():
    core = make_core(num_blocks=4, max_pinned_share=0.5)
    run(core, 0, A, cache_pin_s=100.0)
    submit(core, 1, B, max_tokens=8)
    plan = schedule(core)
    while not answer(core, plan, 0).finished:
        plan = schedule(core)
    load = core.load()
    assert (load.num_preemptions, load.num_pinned_blocks) == (0, 0)


def test_no_more_pins_are_given_up_than_a_decode_needs():
    core = make_core(num_blocks=4, max_pinned_share=0.5)
    run(core, 0, A, cache_pin_s=10.0)
    submit(core, 1, range(20, 28), max_tokens=3)
    answer(core, schedule(core), 0)
    schedule(core)
    assert (core.load().num_running, core.load().num_pinned_blocks) == (1, 1)


def test_others_are_preempted_rather_than_pins_given_up():
    core = make_core(num_blocks=4, max_pinned_share=0.5)
    run(core, 0, A, cache_pin_s=100.0)
    submit(core, 1, [60, 61, 62], max_tokens=8)
    submit(core, 2, [70, 71, 72], max_tokens=8)
    plan = schedule(core)
    while core.load().num_preemptions == 0:
        answer(core, plan, *plan.chunk_rows.tolist() or (0, 1))
        plan = schedule(core)
    assert core.load().num_pinned_blocks == 2


def with_a_demoted_prompt_to_pin():
    """Request 2 pins a prompt whose blocks are on the host."""
    core = make_core(num_blocks=4, num_host_blocks=4, max_pinned_share=0.5)
    run(core, 0, A)
    run(core, 1, range(50, 65))  # needs all blocks: A is demoted
    submit(core, 2, [*A, 9], max_tokens=4, cache_pin_s=10.0)
    return core


def test_a_prompt_found_on_the_host_is_pinned_when_its_swap_in_has_succeeded():
    core = with_a_demoted_prompt_to_pin()
    plans = []
    while not (plans and plans[-1].chunk_rows.size):
        plans.append(schedule(core))
        if len(plans) == 2 and not plans[-1].chunk_rows.size:
            answer(core, plans.pop(0))
    assert core.load().num_pinned_blocks == 0
    assert plans[0].swap_in_dst_block_ids.size == 2
    events = answer(core, plans[0])
    assert [pin.num_tokens for pin in events.pinned] == [8]
    assert core.load().num_pinned_blocks == 2


def test_a_prompt_whose_sequence_is_gone_before_its_swap_in_has_ended_is_not_pinned():
    core = with_a_demoted_prompt_to_pin()
    while not (plan := schedule(core)).swap_in_dst_block_ids.size:
        answer(core, plan)
    following = schedule(core)  # computes the prompt
    core.cancel(ROUTER, [2])
    assert answer(core, plan).pinned == answer(core, following).pinned == ()
    assert core.load().num_pinned_blocks == 0


def test_pins_end_one_after_the_other():
    core = make_core(max_pinned_share=1.0)
    run(core, 0, A, cache_pin_s=10.0)
    run(core, 1, B, cache_pin_s=20.0)
    num_pinned = []
    for now in (9.0, 10.0, 19.0, 20.0):
        core.schedule(now)
        num_pinned.append(core.load().num_pinned_blocks)
    assert num_pinned == [4, 2, 2, 0]


def test_distrusted_blocks_are_not_pinned():
    core = make_core(max_pinned_share=0.5)
    submit(core, 0, A, cache_pin_s=10.0)
    plan = schedule(core)
    assert core.load().num_pinned_blocks == 2
    answer(core, plan, failed=[0])
    assert (core.load().num_pinned_blocks, num_found(core, A)) == (0, 0)


def test_without_prefix_caching_nothing_is_pinned():
    core = make_core(enable_prefix_caching=False)
    assert run(core, 0, A, cache_pin_s=3.0) == [0]


def test_a_tenant_has_a_share_of_its_own():
    core = make_core(num_blocks=16, max_pinned_share=0.5, max_tenant_pinned_share=0.25)
    assert run(core, 0, range(20), cache_pin_s=10.0, tenant="a") == [16]
    assert run(core, 1, B, cache_pin_s=10.0, tenant="a") == [0]
    assert run(core, 2, B, cache_pin_s=10.0, tenant="b") == [8]
    assert run(core, 3, C, cache_pin_s=10.0) == [8], "without a tenant there is one bound"
    no_tenants = make_core(max_pinned_share=0.5, max_tenant_pinned_share=0.0)
    assert run(no_tenants, 0, A, cache_pin_s=10.0) == [8]
    check(core)
    core.schedule(now=10.0)
    check(core)
    assert run(core, 4, B, now=10.0, cache_pin_s=10.0, tenant="a") == [8]
    check(core)


def test_a_request_is_unpinned_by_its_tenant_and_name():
    core = make_core(max_pinned_share=1.0)
    run(core, 0, A, cache_pin_s=10.0, tenant="a")
    run(core, 1, B, cache_pin_s=10.0, tenant="a")
    for tenant, name in (("b", "request-0"), ("a", "request-2"), ("a", "request-0")):
        core.unpin(tenant, name)
        check(core)
    assert (core.load().num_pinned_blocks, num_found(core, A)) == (2, 8), "it stays in the cache"


def test_what_a_later_request_has_pinned_for_longer_stays():
    core = make_core(max_pinned_share=1.0)
    run(core, 0, A, cache_pin_s=10.0)
    run(core, 1, [*A, *B], now=5.0, cache_pin_s=10.0)  # as the next turn of a conversation
    core.unpin("", "request-0")
    assert core.load().num_pinned_blocks == 4
    run(core, 2, A, now=6.0, cache_pin_s=1.0)
    core.unpin("", "request-2")
    assert core.load().num_pinned_blocks == 4, "it ended sooner"
    core.unpin("", "request-1")
    check(core)
    assert core.load().num_pinned_blocks == 0


def test_what_several_requests_have_pinned_ends_with_the_last_of_them():
    core = make_core(max_pinned_share=1.0)
    run(core, 0, A, cache_pin_s=20.0)
    run(core, 1, [*A, *B], cache_pin_s=30.0)
    run(core, 2, A, cache_pin_s=25.0)
    core.unpin("", "request-1")
    check(core)
    assert core.load().num_pinned_blocks == 2
    run(core, 3, B, now=24.0)
    assert core.load().num_pinned_blocks == 2, "request-2 asked for 25 s"
    run(core, 4, B, now=26.0)
    assert core.load().num_pinned_blocks == 0


def test_what_an_earlier_request_has_pinned_stays_until_it_ends_or_is_unpinned():
    core = make_core(max_pinned_share=1.0)
    run(core, 0, A, cache_pin_s=20.0)
    run(core, 1, [*A, *B], cache_pin_s=30.0)
    core.unpin("", "request-1")
    core.schedule(now=19.0)
    assert core.load().num_pinned_blocks == 2
    core.unpin("", "request-0")
    check(core)
    assert core.load().num_pinned_blocks == 0


def test_pins_that_have_ended_leave_no_trace():
    core = make_core(max_pinned_share=1.0)
    run(core, 0, A, cache_pin_s=30.0, tenant="a")
    run(core, 1, A, cache_pin_s=20.0, tenant="a")
    core.schedule(now=30.0)
    assert not core.pins.owned
    assert not core.pins._num_of
    run(core, 2, A, now=31.0, cache_pin_s=10.0)
    core.unpin("", "request-2")
    assert core.load().num_pinned_blocks == 0


def test_a_pin_that_moves_keeps_its_tenant_and_both_its_requests():
    core = make_core(max_pinned_share=0.5, defragment_interval_s=0.0)
    run(core, 0, C)
    run(core, 1, A, cache_pin_s=20.0, tenant="a")
    run(core, 2, A, cache_pin_s=10.0, tenant="b")
    core.defragment()
    plan = schedule(core)
    assert plan.renamed_src_block_ids.size == 2
    answer(core, plan)
    assert len(core.pins.tenants) == 2
    core.unpin("a", "request-1")
    check(core)
    assert core.load().num_pinned_blocks == 2
    core.unpin("b", "request-2")
    check(core)
    assert core.load().num_pinned_blocks == 0


def test_of_a_prompt_that_is_pinned_when_its_time_has_passed_the_worker_is_not_told():
    core = with_a_demoted_prompt_to_pin()
    while not (plan := schedule(core)).swap_in_dst_block_ids.size:
        answer(core, plan)
    schedule(core)  # computes the prompt
    assert [pin.num_tokens for pin in answer(core, plan).pinned] == [8]
    assert schedule(core, now=10.0).pins == ()


WINDOWS = {"kv_windows": (None, 8), "num_blocks": 25}
"""A prompt of 16 tokens keeps six blocks: four, and two of the group with a window."""


def test_with_a_window_a_prompt_is_pinned_as_a_whole_or_not_at_all():
    core = make_core(**WINDOWS, max_pinned_share=6 / 25)
    assert run(core, 0, range(16), cache_pin_s=10.0) == [16]
    assert core.load().num_pinned_blocks == 6
    assert run(core, 1, range(50, 66), cache_pin_s=10.0) == [0]
    assert run(core, 2, range(16), cache_pin_s=10.0) == [16], "it is pinned already"
    assert core.load().num_pinned_blocks == 6


def test_with_a_window_a_tenant_has_a_share_of_its_own():
    core = make_core(**WINDOWS, max_pinned_share=0.5, max_tenant_pinned_share=6 / 25)
    assert run(core, 0, range(16), cache_pin_s=10.0, tenant="a") == [16]
    assert run(core, 1, range(50, 66), cache_pin_s=10.0, tenant="a") == [0]
    core = make_core(**WINDOWS, max_pinned_share=0.5, max_tenant_pinned_share=0.1)
    assert run(core, 0, range(16), cache_pin_s=10.0) == [16]


def test_with_a_window_a_prompt_is_not_pinned_if_a_block_of_it_is_gone():
    core = make_core(**WINDOWS, max_pinned_share=0.5, max_num_batched_tokens=8)
    submit(core, 0, range(16), cache_pin_s=10.0)
    answer(core, schedule(core))
    core.pool.forget(next(iter(core.running)).block_ids[:1])
    assert [pin.num_tokens for pin in answer(core, schedule(core), 0).pinned] == [0]
    assert core.load().num_pinned_blocks == 0


def test_a_prompt_that_is_unpinned_before_its_swap_in_has_ended_is_not_pinned():
    core = with_a_demoted_prompt_to_pin()
    while not (plan := schedule(core)).swap_in_dst_block_ids.size:
        answer(core, plan)
    following = schedule(core)  # computes the prompt
    core.unpin("", "request-2")
    assert answer(core, plan).pinned == answer(core, following).pinned == ()
    assert core.load().num_pinned_blocks == 0


def test_with_a_host_pins_go_down_before_a_sequence_is_preempted():
    core = make_core(num_blocks=4, num_host_blocks=8, max_pinned_share=0.5)
    run(core, 0, A, cache_pin_s=100.0)
    submit(core, 1, [60, 61, 62], max_tokens=5)
    submit(core, 2, [70, 71, 72], max_tokens=5)
    while core.load().num_running + core.load().num_waiting:
        plan = schedule(core)
        answer(core, plan, *plan.chunk_rows.tolist() or (0, 1))
        check(core)
    load = core.load()
    assert (load.num_preemptions, load.num_pinned_blocks) == (0, 0)
    assert num_found(core, A) == 8, "it is on the host"


@pytest.mark.parametrize("num_host_blocks", [1, 8])
def test_with_a_host_pins_go_down_before_a_sequence_waits(num_host_blocks):
    core = make_core(num_blocks=8, num_host_blocks=num_host_blocks, max_pinned_share=0.5)
    run(core, 0, A, cache_pin_s=100.0)
    run(core, 1, B, cache_pin_s=50.0)
    submit(core, 2, range(60, 67), max_tokens=4)
    answer(core, schedule(core), 0)
    submit(core, 3, range(70, 81), max_tokens=4)  # of four blocks, two are free
    answer(core, schedule(core), 1)
    load = core.load()
    assert (load.num_running, load.num_waiting, load.num_pinned_blocks) == (2, 0, 3)
    assert num_found(core, A) == 8


def test_all_pins_go_down_for_a_sequence_that_needs_all_their_blocks():
    core = make_core(num_blocks=8, num_host_blocks=8, max_pinned_share=0.5)
    run(core, 0, A, cache_pin_s=100.0)
    run(core, 1, B, cache_pin_s=50.0)
    submit(core, 2, range(60, 67), max_tokens=4)
    answer(core, schedule(core), 0)
    submit(core, 3, range(70, 93), max_tokens=4)  # of six blocks, two are free
    schedule(core)
    assert (core.load().num_running, core.load().num_pinned_blocks) == (2, 0)


def test_a_pin_of_a_block_that_a_sequence_holds_makes_no_room():
    core = make_core(num_blocks=8, num_host_blocks=8, max_pinned_share=0.5)
    run(core, 0, A, cache_pin_s=100.0)
    run(core, 1, B, cache_pin_s=50.0)
    submit(core, 2, [*B, 9], max_tokens=3)  # holds the pins that end first
    answer(core, schedule(core), 0)
    submit(core, 3, range(60, 76), max_tokens=1)  # of four blocks, three are free
    schedule(core)
    assert (core.load().num_running, core.load().num_pinned_blocks) == (2, 1)


def test_without_a_host_a_sequence_waits_rather_than_pins_given_up():
    core = make_core(num_blocks=8, max_pinned_share=0.5)
    run(core, 0, A, cache_pin_s=100.0)
    run(core, 1, B, cache_pin_s=50.0)
    submit(core, 2, range(60, 67), max_tokens=4)
    answer(core, schedule(core), 0)
    submit(core, 3, range(70, 81), max_tokens=4)  # of three blocks, two are free
    answer(core, schedule(core), 0)
    load = core.load()
    assert (load.num_running, load.num_waiting, load.num_pinned_blocks) == (1, 1, 4)


def test_pins_stay_if_they_are_too_few_to_start_a_sequence():
    core = make_core(num_blocks=8, num_host_blocks=8, max_pinned_share=0.5)
    run(core, 0, A, cache_pin_s=100.0)
    submit(core, 1, range(60, 75), max_tokens=4)
    answer(core, schedule(core), 0)
    submit(core, 2, range(100, 127), max_tokens=4)  # seven blocks
    answer(core, schedule(core), 0)
    load = core.load()
    assert (load.num_running, load.num_waiting, load.num_pinned_blocks) == (1, 1, 2)
