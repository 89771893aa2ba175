"""Examples of the host tier: the step in which each block moves, and its target."""

import pytest
from core_driver import (
    ROUTER,
    answer,
    chunks,
    grown,
    ins,
    make_core,
    new,
    outs,
    schedule,
    submit,
)

from contract.hashing import root_hash
from scheduler_svc.core.interface.config import PreemptionMode
from scheduler_svc.core.interface.errors import BrokenInvariantError
from scheduler_svc.core.interface.events import Preempted
from scheduler_svc.core.invariants import check


def run_alone(core, key, prompt, max_tokens=1):
    """Run a sequence to its end; its blocks are cached afterwards."""
    submit(core, key, prompt, max_tokens=max_tokens)
    while not (plan := schedule(core)).released_rows.size:
        answer(core, plan, 0)
    answer(core, plan)
    return plan


def make_preempted(**overrides):
    """A core in which sequence 1, with tokens 5 6 7 and two sampled, was just preempted for 0."""
    settings = {"num_host_blocks": 4, "preemption_mode": PreemptionMode.SWAP}
    core = make_core(num_blocks=3, **(settings | overrides))
    submit(core, 0, [1, 2, 3, 4], max_tokens=8)
    submit(core, 1, [5, 6, 7], max_tokens=8)
    plan = schedule(core)
    assert new(plan) == [(0, 0, [0]), (1, 0, [1])]
    answer(core, plan, 0, 1)
    plan = schedule(core)
    assert grown(plan) == {0: 2}
    answer(core, plan, 0, 1)
    plan = schedule(core)
    assert core.load().num_preemptions == 1
    assert plan.released_rows.tolist() == [1]
    return core, plan


def finish_row_0(core, plan):
    while not answer(core, plan, 0).finished:
        plan = schedule(core)


def test_a_swapped_sequence_comes_back_one_step_before_it_computes_its_last_token():
    core, plan = make_preempted(enable_prefix_caching=False)
    assert outs(plan) == {1: 0}, "four computed tokens are one block"
    load = core.load()
    assert (load.num_swapped, load.num_waiting, load.num_free_host_blocks) == (1, 1, 3)
    finish_row_0(core, plan)

    plan = schedule(core)
    ((source, target),) = ins(plan).items()
    assert source == 0
    assert not plan.new_sequences
    assert plan.num_scheduled_tokens == 0
    following = schedule(core)
    ((row, num_computed, blocks),) = new(following)
    assert (num_computed, blocks[0], len(blocks)) == (4, target, 2)
    assert chunks(following) == {row: 1}
    assert core.load().num_free_host_blocks == 3, "until the swap-in is known to have succeeded"
    answer(core, plan)
    load = core.load()
    assert (load.num_swapped, load.num_free_host_blocks, load.num_recomputed_tokens) == (0, 4, 0)
    assert (load.num_swapped_out_blocks, load.num_swapped_in_blocks) == (1, 1)


def test_what_the_device_still_has_of_a_swapped_sequence_is_not_swapped_in():
    core, plan = make_preempted()
    answer(core, plan, 0)
    core.cancel(ROUTER, [0])
    plan = schedule(core)
    ((_, num_computed, blocks),) = new(plan)
    assert (num_computed, blocks[0]) == (4, 1)
    assert not ins(plan)
    assert core.load().num_recomputed_tokens == 0


def test_kv_of_a_swapped_sequence_can_be_found_on_the_host():
    core, plan = make_preempted()
    assert outs(plan) == {1: 0}
    core.cancel(ROUTER, [1])
    assert core.load().num_cached_host_blocks == 1


def test_a_swapped_sequence_resumes_in_a_step_without_room_for_prompts():
    core = make_core(
        num_host_blocks=4, preemption_mode=PreemptionMode.SWAP, enable_prefix_caching=False
    )
    for key in range(2):
        submit(core, key, [key] * 3)
    answer(core, schedule(core), 0, 1)
    core.preemption.preempt(max(core.running, key=core.queue.sort_key))
    submit(core, 2, [2] * 3)
    for _ in range(4):
        plan = core.schedule(0.0, max_paced_tokens=0)
        answer(core, plan, 0, *chunks(plan))
    assert [seq.seq_key for seq in core.running] == [0, 1]
    assert core.rows.num_tokens(1) > 4


def test_a_preempted_sequence_has_computed_nothing_while_cached_blocks_are_swapped_in():
    core = make_core(num_blocks=8, num_host_blocks=8)
    run_alone(core, 0, [1] * 9)
    run_alone(core, 1, [2] * 30)
    submit(core, 2, [1] * 9, traceparent="t")
    while not ins(plan := schedule(core)):
        answer(core, plan)
    (seq,) = core.running
    core.preemption.preempt(seq)
    answer(core, plan)
    assert schedule(core).trace_events[0] == Preempted(ROUTER, 2, 0, 0)


def test_recompute_gives_the_host_nothing_however_fast_it_is():
    core, plan = make_preempted(
        preemption_mode=PreemptionMode.RECOMPUTE,
        enable_prefix_caching=False,
        swap_bytes_per_s=1e9,
        prefill_tokens_per_s=1.0,
    )
    assert not outs(plan)
    finish_row_0(core, plan)
    assert new(schedule(core))[0][1] == 0
    assert core.load().num_recomputed_tokens == 4


def test_without_room_on_the_host_a_sequence_is_recomputed():
    core, plan = make_preempted(num_host_blocks=0, enable_prefix_caching=False)
    assert not outs(plan)
    assert core.load().num_swapped == 0


# Swapping 400 bytes out and in takes 8 s at 100 bytes/s; computing four tokens 8 s at 0.5 tokens/s.
@pytest.mark.parametrize(
    ("bytes_per_s", "tokens_per_s", "swaps"),
    [(101, 0.5, True), (99, 0.5, False), (100, 0.51, False), (0, 0.5, False), (0, 0, False)],
)
def test_by_cost_the_faster_way_is_taken(bytes_per_s, tokens_per_s, swaps):
    _, plan = make_preempted(
        preemption_mode=PreemptionMode.COST,
        bytes_per_block=400,
        swap_bytes_per_s=bytes_per_s,
        prefill_tokens_per_s=tokens_per_s,
    )
    assert bool(outs(plan)) == swaps


def test_tokens_of_a_failed_swap_in_are_computed_again_and_what_came_of_it_is_dropped():
    core, plan = make_preempted(enable_prefix_caching=False)
    finish_row_0(core, plan)
    plan = schedule(core)
    ((_, target),) = ins(plan).items()
    following = schedule(core)
    ((row, _, _),) = new(following)
    answer(core, plan, failed_blocks=[target])
    events = answer(core, following, row)
    assert not events.token_ids.size, "computed from what the failed swap-in left"
    plan = schedule(core)
    assert plan.released_rows.tolist() == [row]
    ((_, num_computed, _),) = new(plan)
    assert num_computed == 0
    load = core.load()
    assert (load.num_free_host_blocks, load.num_recomputed_tokens) == (4, 4)


def test_a_failure_that_no_swap_in_explains_is_a_bug():
    core = make_core(num_host_blocks=2)
    submit(core, 0, [1])
    with pytest.raises(BrokenInvariantError, match="step 1 did not swap block 3 in"):
        answer(core, schedule(core), 0, failed_blocks=[3])


def make_swapping_in():
    """A core in which one of sequence 1's three blocks is being swapped in, and two wait."""
    core = make_core(
        num_blocks=5,
        num_host_blocks=4,
        preemption_mode=PreemptionMode.SWAP,
        max_swap_blocks=1,
        enable_prefix_caching=False,
    )
    submit(core, 0, [1, 2, 3, 4], max_tokens=12)
    submit(core, 1, [5] * 9, max_tokens=8)
    plan = schedule(core)
    while not core.load().num_swapped:
        answer(core, plan, 0, 1)
        plan = schedule(core)
    assert outs(plan) == {1: 0, 2: 1, 3: 2}
    answer(core, plan, 0)
    core.cancel(ROUTER, [0])
    plan = schedule(core)
    assert list(ins(plan)) == [0]
    return core, plan


def expect_all_free(core):
    while (plan := core.schedule(0.0)) is not None:
        answer(core, plan)
    load = core.load()
    assert (load.num_free_blocks, load.num_free_host_blocks) == (5, 4)


def test_a_sequence_starts_when_the_last_of_its_blocks_is_there():
    core, plan = make_swapping_in()
    for source in (1, 2):
        answer(core, plan)
        plan = schedule(core)
        assert (list(ins(plan)), new(plan)) == ([source], [])
    ((_, num_computed, _),) = new(schedule(core))
    assert num_computed == 12


def test_a_sequence_cancelled_while_swapped_leaves_nothing():
    core, plan = make_swapping_in()
    core.preemption.preempt(max(core.running, key=core.queue.sort_key))
    check(core)
    assert core.load().num_swapped == 1, "its blocks on the host were kept"
    core.cancel(ROUTER, [1])
    check(core)
    answer(core, plan)
    expect_all_free(core)
    assert core.load().num_swapped_in_blocks == 1


def test_a_sequence_cancelled_while_it_is_swapped_in_leaves_nothing():
    core, plan = make_swapping_in()
    core.cancel(ROUTER, [1])
    check(core)
    load = core.load()
    assert load.num_free_host_blocks == 3, "one is being read"
    assert load.num_free_blocks == 1, "the step in flight may write the others"
    answer(core, plan)
    expect_all_free(core)


def make_demoted(num_host_blocks=4, **overrides):
    """A core of four device blocks; blocks 3 and 4 of [1] * 13 are on the host, as 0 and 1."""
    core = make_core(num_blocks=4, num_host_blocks=num_host_blocks, **overrides)
    run_alone(core, 0, [1] * 13, max_tokens=1)
    submit(core, 1, [2] * 11, max_tokens=2)
    plan = schedule(core)  # takes three blocks: the free one, and the last two of the other prompt
    assert new(plan) == [(0, 0, [3, 2, 1])]
    return core, plan


def test_an_evicted_block_is_demoted_in_the_step_that_reuses_it():
    core, plan = make_demoted()
    assert outs(plan) == {2: 0, 1: 1}
    load = core.load()
    assert (load.num_demoted_blocks, load.num_cached_host_blocks) == (2, 2)


def test_a_host_that_is_full_gives_up_its_oldest():
    core, plan = make_demoted(num_host_blocks=1)
    assert outs(plan) == {1: 0}, "the later move to host block 0"
    assert core.load().num_cached_host_blocks == 1


def test_without_a_prefix_cache_an_evicted_host_block_is_not_written_to_the_disk():
    core = make_core(num_host_blocks=1, num_disk_blocks=4, enable_prefix_caching=False)
    blocks = core.tier.pool.allocate(1)  # an earlier scheduler has labelled it
    core.tier.pool.publish(blocks, [root_hash("")])
    core.tier.pool.drop(blocks)
    core.tier.take_free()
    assert not core.tier.disk.has_moves


def test_no_more_than_the_limit_is_demoted():
    _, plan = make_demoted(max_swap_blocks=1)
    assert outs(plan) == {2: 0}


def test_a_prompt_is_found_across_the_tiers_and_promoted():
    core, plan = make_demoted()
    answer(core, plan, 0)
    core.cancel(ROUTER, [1])
    submit(core, 2, [1] * 13, max_tokens=1)
    first = schedule(core)
    # Block 0 is on the device; three blocks of others are free: not full, or demoted before.
    assert not first.new_sequences
    plans = [first]
    while not (plan := schedule(core)).new_sequences:
        answer(core, plans[-1])
        plans.append(plan)
    assert [sorted(ins(p)) for p in plans if ins(p)] == [[0, 1]]
    assert all(not (outs(p) and ins(p)) for p in plans)
    ((_, num_computed, blocks),) = new(plan)
    assert (num_computed, blocks[0]) == (12, 0)
    assert blocks[1:3] == [target for p in plans for _, target in sorted(ins(p).items())][::-1]
    assert core.load().num_promoted_blocks == 2


def test_equal_prompts_that_arrive_together_are_promoted_once():
    core = make_core(num_blocks=8, num_host_blocks=8)
    run_alone(core, 0, [1] * 9, max_tokens=1)
    run_alone(core, 1, [2] * 30, max_tokens=1)
    assert core.load().num_demoted_blocks == 2
    submit(core, 2, [1] * 9)
    submit(core, 3, [1] * 9)
    plans = [schedule(core)]
    while not new(plans[-1]):
        answer(core, plans[-1])
        plans.append(schedule(core))
    (first, second) = new(plans[-1])
    assert first[1:] == (8, [*first[2][:2], first[2][2]])
    assert second[1] == 8
    assert second[2][:2] == first[2][:2]
    assert core.load().num_swapped_in_blocks == 2


def test_a_swap_in_that_two_waited_for_is_called_off_with_the_second():
    core = make_core(num_blocks=8, num_host_blocks=8, max_swap_blocks=2)
    for key, length in enumerate((16, 16, 8, 8)):
        run_alone(core, key, [key] * length)
    submit(core, 10, [0] * 17)
    submit(core, 11, [0] * 17)
    plan = schedule(core)
    while not ins(plan):
        answer(core, plan)
        plan = schedule(core)
    assert len(ins(plan)) == 2, "and two wait"
    for key in (10, 11):
        assert core.tier.has_moves
        core.cancel(ROUTER, [key])
        check(core)
    assert not core.tier.has_moves


def test_a_corrupt_block_of_the_cache_is_not_found_again():
    core, plan = make_demoted()
    answer(core, plan, 0)
    core.cancel(ROUTER, [1])
    submit(core, 2, [1] * 13, max_tokens=1)
    plan = schedule(core)
    while not ins(plan):
        answer(core, plan)
        plan = schedule(core)
    targets = list(ins(plan).values())
    answer(core, plan, failed_blocks=targets)
    plan = schedule(core)
    ((_, num_computed, _),) = new(plan)
    assert num_computed == 4, "block 0 of the device"
    assert not ins(plan)


def test_while_swap_ins_wait_what_growth_evicts_is_lost_so_that_they_can_go():
    core = make_core(num_blocks=7, num_host_blocks=8)
    run_alone(core, 0, [1] * 9)
    run_alone(core, 1, [2] * 25)  # demotes 0's two blocks
    submit(core, 2, [3] * 3, max_tokens=9)
    for _ in range(5):
        plan = schedule(core)
        answer(core, plan, 0)
    submit(core, 3, [1] * 9, max_tokens=3)
    plan = schedule(core)
    assert len(outs(plan)) == 3, "room for 3, whose swap-ins must wait"
    answer(core, plan, 0)
    plan = schedule(core)
    assert grown(plan) == {0: 3}, "a block that was cached"
    assert (len(outs(plan)), len(ins(plan))) == (0, 2)
    answer(core, plan, 0)
    assert [num_computed for _, num_computed, _ in new(schedule(core))] == [8]


def test_a_failed_swap_in_takes_the_forks_with_it():
    core = make_core(num_blocks=8, num_host_blocks=8)
    for key, length in enumerate((16, 16, 8, 8)):
        run_alone(core, key, [key] * length)
    submit(core, 10, [0] * 18, n=2)
    while not ins(plan := schedule(core)):
        answer(core, plan)
    following = schedule(core)
    assert core.load().num_running == 2, "forked in the step that computes the prompt"
    answer(core, plan, failed_blocks=list(ins(plan).values())[:1])
    assert core.load().num_preemptions == 2
    answer(core, following, new(following)[0][0])
    plan = schedule(core)
    assert new(plan)[0][1] == 0


def test_what_comes_of_a_prompt_that_breaks_the_model_is_forgotten_by_the_host_too():
    core, plan = make_demoted()
    answer(core, plan, 0)
    core.cancel(ROUTER, [1])
    submit(core, 2, [1] * 13, max_tokens=2)
    while not new(plan := schedule(core)):
        answer(core, plan)
    ((row, num_computed, _),) = new(plan)
    assert num_computed == 12
    assert core.load().num_cached_host_blocks > 0
    cached = core.load().num_cached_host_blocks
    answer(core, plan, failed=[row])
    assert core.load().num_cached_host_blocks == cached - 2
    submit(core, 3, [1] * 13, max_tokens=1)
    while not new(plan := schedule(core)):
        answer(core, plan)
    assert new(plan)[0][1] == 0


@pytest.mark.parametrize(("num_tokens", "starts"), [(4, True), (5, False)])
def test_while_swap_ins_wait_no_admission_evicts_blocks(num_tokens, starts):
    core = make_core(num_blocks=12, num_host_blocks=8, max_swap_blocks=2)
    for key, length in enumerate((16, 16, 16, 8, 8)):
        run_alone(core, key, [key] * length)
    submit(core, 9, [8])
    answer(core, schedule(core), 0)
    submit(core, 10, [0] * 17)
    while not ins(plan := schedule(core)):
        answer(core, plan, 0)
    core.cancel(ROUTER, [9])
    submit(core, 11, [9] * num_tokens)
    answer(core, plan)
    assert core.load().num_free_blocks == 1
    plan = schedule(core)
    assert (len(ins(plan)), len(new(plan))) == (2, starts)
    answer(core, plan)
    assert len(new(schedule(core))) == 2 - starts


@pytest.mark.parametrize("block_size", [4, 8])
def test_a_block_for_growth_is_evicted_two_steps_before_while_it_can_be_demoted(block_size):
    core = make_core(num_blocks=4, num_host_blocks=4, block_size=block_size)
    run_alone(core, 0, [1] * (3 * block_size + 1), max_tokens=1)
    submit(core, 1, [2] * (block_size - 2), max_tokens=4)
    moves = []
    for _ in range(4):
        plan = schedule(core)
        moves.append((outs(plan), grown(plan)))
        answer(core, plan, 0)
    assert moves == [({}, {}), ({2: 0}, {}), ({}, {}), ({}, {0: 2})]
