"""Examples of a pool that grows and shrinks: moves of blocks, and when a block is removed."""

import pytest
from core_driver import ROUTER, answer, make_core, new, schedule, submit

from scheduler_svc.core.interface.config import PreemptionMode
from scheduler_svc.core.interface.errors import BrokenInvariantError, ResizeRefusedError
from scheduler_svc.core.invariants import check
from scheduler_svc.core.reports.describe import BlockState, Query, describe
from scheduler_svc.core.reports.load import read_space
from scheduler_svc.core.space.blocks import BlockPool, DeviceBlockId

PROMPT = list(range(5))  # two blocks


def core_of(num_blocks=12, **overrides):
    settings = {"max_num_blocks": 24, "defragment_interval_s": 0.0, "max_model_len": 32}
    return make_core(num_blocks=num_blocks, **(settings | overrides))


def copied(plan):
    pairs = plan.copy_src_block_ids.tolist(), plan.copy_dst_block_ids.tolist()
    return list(zip(*pairs, strict=True))


def held(core):
    return [block for block, count in enumerate(core.pool.ref_counts.tolist()) if count]


def run_three(core, max_tokens=3):
    """Run sequences in blocks [0, 1], [2, 3], [4, 5]; one step is in flight."""
    for key in range(3):
        submit(core, key, [10 * key + token for token in PROMPT], max_tokens=max_tokens)
    plan = schedule(core)
    assert [blocks for _, _, blocks in new(plan)] == [[0, 1], [2, 3], [4, 5]]
    return plan


def test_blocks_that_come_are_given_after_those_that_were_there():
    core = core_of(num_blocks=4, max_num_seqs=4)
    core.resize(7)
    check(core)
    load = core.load()
    assert load.num_free_blocks == load.num_blocks == 7
    run_three(core)
    assert core.max_request_len == 28


def test_a_sequence_that_was_too_long_is_taken_when_blocks_have_come():
    core = core_of(num_blocks=4)
    assert core.max_request_len == 16
    core.resize(6)
    submit(core, 0, list(range(20)), max_tokens=4)
    ((_, _, blocks),) = new(schedule(core))
    assert blocks == [0, 1, 2, 3, 4]


def test_an_idle_pool_is_shrunk_at_once():
    core = core_of()
    core.shrink(5)
    assert not core.resizing.is_shrunk, "that needs a look between two steps"
    assert core.schedule(0.0) is None
    assert core.resizing.is_shrunk
    assert core.defragmenter.take_reports() == (), "nobody asked for a measurement"
    check(core)
    core.resize(5)
    check(core)
    load = core.load()
    assert load.num_blocks == load.num_free_blocks == 5


def test_a_pool_that_was_shrunk_is_described():
    core = core_of()
    core.shrink(5)
    core.schedule(0.0)
    core.resize(5)
    (device,) = describe(core, Query()).tiers
    assert device.num_blocks == device.state_to_num_blocks[BlockState.FREE] == 5


def test_held_blocks_move_below_and_are_gone_when_the_step_is_answered():
    core = core_of()
    answer(core, run_three(core, max_tokens=9), 0, 1, 2)
    core.cancel(ROUTER, [0])
    core.shrink(4)
    assert core.resizing.num_leaving_blocks == 2
    plan = schedule(core)
    assert copied(plan) == [(5, 1), (4, 0)]
    assert held(core) == [0, 1, 2, 3, 4, 5], "the step may still read the old places"
    assert not core.resizing.is_shrunk
    assert core.schedule(0.0) is None, "until it is answered nothing else is made room for"
    answer(core, plan, 1, 2)
    assert held(core) == [0, 1, 2, 3]
    following = schedule(core)
    assert not core.resizing.is_shrunk, "it may have told the worker of what was in them"
    answer(core, following, 1, 2)
    assert core.resizing.is_shrunk
    core.resize(4)
    check(core)
    assert core.defragmenter.take_reports() == (), "nobody asked for a pass"


def test_leaving_blocks_count_as_free_nowhere():
    core = core_of()
    answer(core, run_three(core, max_tokens=9), 0, 1, 2)
    core.cancel(ROUTER, [0])
    core.shrink(4)
    load, space = core.load(), read_space(core)
    (tier,) = describe(core, Query()).tiers
    counts = tier.state_to_num_blocks
    free = load.num_free_blocks + load.num_cached_blocks
    assert counts[BlockState.FREE] + counts[BlockState.CACHED] == free
    assert space.device.num_free_blocks == free == 2, "where sequence 0 was"
    assert (counts[BlockState.HELD], counts[BlockState.RETIRED]) == (4, 6)
    core.resize(12)  # the worker could not shrink
    load = core.load()
    assert read_space(core).device.num_free_blocks == 8
    assert load.num_free_blocks + load.num_cached_blocks == 8


def test_it_is_shrunk_when_every_step_is_answered_that_was_sent_before():
    core = core_of()
    plan = run_three(core)
    following = schedule(core)
    core.cancel(ROUTER, [2])
    core.shrink(4)
    assert core.schedule(0.0) is None, "two are in flight"
    answer(core, plan, 0, 1, 2)
    assert core.schedule(0.0) is None, "the other may make room"
    answer(core, following, 0, 1, 2)
    released = schedule(core)
    assert released.released_rows.tolist() == [2]
    assert not core.resizing.is_shrunk
    while not core.resizing.is_shrunk:
        answer(core, released, *(row for row in (0, 1) if core.rows.owner(row)))
        released = core.schedule(0.0)
    assert core.steps.last_answered >= 3, "with which the worker forgot the row"
    core.resize(4)
    check(core)


def test_blocks_that_are_being_swapped_in_move_afterwards():
    core = core_of(
        num_host_blocks=8,
        preemption_mode=PreemptionMode.SWAP,
        enable_prefix_caching=False,
        max_swap_blocks=1,
    )
    for key in range(2):
        submit(core, key, [key] * 9, max_tokens=3)
    answer(core, schedule(core), 0, 1)
    (seq,) = core.live.find(ROUTER, [1])
    core.preemption.preempt(seq)
    answer(core, schedule(core), 0)
    assert sorted(seq.block_ids) == [3, 4, 5]
    core.cancel(ROUTER, [0])
    core.shrink(3)
    moved = []
    while seq.loading_block_ids:
        loading = {*seq.loading_block_ids}
        plan = schedule(core)
        moved += [src for src, _ in copied(plan)]
        assert loading.isdisjoint(moved)
        answer(core, plan)
    plan = schedule(core)
    moved += [src for src, _ in copied(plan)]
    assert sorted(moved) == [3, 4, 5]
    answer(core, plan, seq.row)
    assert core.resizing.num_leaving_blocks == 0


def test_it_is_shrunk_though_other_steps_follow():
    core = core_of()
    earlier = run_three(core, max_tokens=9)
    core.shrink(8)
    plan = schedule(core)  # holds none of the leaving blocks
    answer(core, earlier, 0, 1, 2)
    schedule(core)
    assert not core.resizing.is_shrunk
    answer(core, plan, 0, 1, 2)
    assert core.resizing.is_shrunk


def test_after_a_resize_another_may_follow():
    core = core_of()
    for num_blocks in (8, 6):
        core.shrink(num_blocks)
        assert core.schedule(0.0) is None
        core.resize(num_blocks)
        assert not core.resizing.is_shrinking
        assert not core.resizing.is_shrunk
    core.resizing.check(24)
    core.resize(24)
    assert core.load().num_free_blocks == 24


def test_a_block_that_is_gone_gets_no_label():
    core = core_of(num_blocks=8, num_host_blocks=8)
    for key, prompt in enumerate(([1] * 9, [2] * 30)):  # the second displaces the first
        submit(core, key, prompt, max_tokens=1)
        answer(core, schedule(core), 0)
    submit(core, 2, [1] * 9)
    while (plan := schedule(core)).swap_in_dst_block_ids.tolist() != [0, 1]:
        answer(core, plan)
    answer(core, plan)  # publishes the blocks; the labels would go with the next plan
    core.cancel(ROUTER, [2])
    core.shrink(1)
    assert core.schedule(0.0) is None
    core.resize(1)
    submit(core, 3, [3], max_tokens=2)
    assert schedule(core).labelled_block_ids.tolist() == [0]


def test_sequences_that_do_not_fit_any_more_are_preempted_and_come_again():
    core = core_of(num_host_blocks=8, preemption_mode=PreemptionMode.SWAP)
    answer(core, run_three(core, max_tokens=9), 0, 1, 2)
    core.shrink(8 - 4)
    plan = schedule(core)
    load = core.load()
    assert (load.num_running, load.num_swapped, load.num_preemptions) == (2, 1, 1)
    assert plan.swap_out_src_block_ids.tolist() == [4, 5]
    answer(core, plan, 0, 1)
    core.schedule(0.0)
    assert core.resizing.num_leaving_blocks == 0


def test_what_is_cached_beyond_is_demoted_as_far_as_there_is_room():
    core = core_of(num_host_blocks=2, max_num_seqs=1)
    for key in range(3):
        submit(core, key, [10 * key + token for token in PROMPT], max_tokens=1)
        answer(core, schedule(core), 0)
    assert core.load().num_cached_blocks == 3
    found = [core.pool._hash_to_block[each] for each in core.pool._cached]
    core.shrink(min(found) + 1)
    load = core.load()
    assert (load.num_cached_blocks, load.num_demoted_blocks) == (1, 2)
    assert not core.resizing.is_shrunk
    plan = schedule(core)
    assert set(plan.swap_out_src_block_ids.tolist()) == {*found} - {min(found)}
    assert core.schedule(0.0) is None
    assert not core.resizing.is_shrunk, "the worker may still read them"
    answer(core, plan)
    assert core.schedule(0.0) is None
    assert core.resizing.is_shrunk


def test_what_the_worker_keeps_after_all_is_in_use_again():
    core = core_of()
    answer(core, run_three(core, max_tokens=9), 0, 1, 2)
    core.shrink(8)
    assert core.load().num_free_blocks == 2
    core.resize(12)
    check(core)
    assert core.load().num_free_blocks == 6
    assert not core.resizing.is_shrunk


def test_blocks_that_are_gone_are_not_moved_any_more():
    """The pass began before, and its move is in flight when the last leaving block is free."""
    core = core_of(max_defragment_moves=1)
    submit(core, 0, range(16), max_tokens=1)
    submit(core, 1, range(20, 35))
    submit(core, 2, [40, 41])
    plan = schedule(core)
    assert [blocks for _, _, blocks in new(plan)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    answer(core, plan, 0, 1, 2)  # 0 has ended: its blocks are cached
    earlier = schedule(core)
    core.cancel(ROUTER, [1])
    core.defragment()
    moving = schedule(core)
    assert copied(moving) == [(8, 0), (0, 8)], "the next ones would be 7, 6 and 5"
    core.shrink(5)
    answer(core, earlier, 2)
    plan = schedule(core)
    answer(core, moving, 2)
    answer(core, plan, 2)
    assert core.resizing.is_shrunk
    core.resize(5)
    check(core)
    assert copied(schedule(core)) == []
    assert [report.num_moved_blocks for report in core.defragmenter.take_reports()] == [2]


def test_a_pass_that_has_begun_ends_with_a_report_though_the_pool_shrinks():
    core = core_of(max_defragment_moves=1)
    answer(core, run_three(core, max_tokens=12), 0, 1, 2)
    core.cancel(ROUTER, [0, 1])
    core.defragment()
    plan = schedule(core)
    assert copied(plan) == [(5, 1)]
    core.shrink(5)
    for _ in range(4):
        following = schedule(core)
        answer(core, plan, 2)
        plan = following
    assert core.resizing.is_shrunk
    assert len(core.defragmenter.take_reports()) == 1


def test_pins_are_given_up_beyond_their_share_of_what_is_left():
    core = core_of(max_pinned_share=0.5)
    submit(core, 0, list(range(20)), max_tokens=1, cache_pin_s=1000.0)
    answer(core, schedule(core), 0)
    assert core.load().num_pinned_blocks == 5
    core.shrink(6)
    check(core)
    assert core.load().num_pinned_blocks == 3


def test_a_pool_that_waits_for_pins_alone_gives_them_up():
    core = core_of(num_blocks=12, max_pinned_share=1.0, max_model_len=8)
    for key in range(3):
        submit(core, key, [10 * key + i for i in range(7)], max_tokens=1, cache_pin_s=1000.0)
        answer(core, schedule(core), 0)
    core.shrink(2)
    while not core.resizing.is_shrunk:
        plan = core.schedule(0.0)
        if plan is not None:
            answer(core, plan)
    core.resize(2)
    check(core)
    assert core.load().num_pinned_blocks <= 2


def test_no_more_pins_are_given_up_than_the_pool_lacks():
    core = core_of(max_pinned_share=1.0, max_model_len=8, kv_windows=(8,))
    for key in range(3):
        submit(core, key, [10 * key + i for i in range(7)], max_tokens=1, cache_pin_s=1000.0)
        answer(core, schedule(core), 0)
    core.shrink(3)
    assert core.load().num_pinned_blocks == 3
    assert core.pool.num_available == -1, "the null block takes one"
    core.schedule(0.0)
    check(core)
    assert core.load().num_pinned_blocks == 2


@pytest.mark.parametrize(
    ("num_blocks", "why"),
    [
        (25, "num_blocks is 25; the worker has reserved room for at most 24"),
        (
            7,
            "num_blocks is 7; it must be at least 8, which is enough for one sequence",
        ),
    ],
)
def test_a_size_beyond_its_limits_is_refused(num_blocks, why):
    core = core_of(min_num_blocks=8)
    with pytest.raises(ResizeRefusedError, match=why):
        core.resizing.check(num_blocks)
    with pytest.raises(ResizeRefusedError, match=why):
        core.shrink(num_blocks)
    check(core)


def test_a_size_that_what_is_live_does_not_fit_is_refused():
    core = core_of(max_model_len=64)
    submit(core, 0, list(range(30)), max_tokens=10)
    with pytest.raises(ResizeRefusedError, match="request 'request-0', which is live, needs more"):
        core.shrink(9)
    core.shrink(10)
    with pytest.raises(ResizeRefusedError, match="num_blocks is 9; a resize to 10 is in progress"):
        core.shrink(9)


def test_a_worker_whose_pool_is_fixed_has_another_size_in_vain():
    with pytest.raises(ResizeRefusedError, match="num_blocks is 9; it is fixed at 12"):
        core_of(max_num_blocks=None).shrink(9)


def test_a_pool_is_not_made_smaller_with_blocks_in_use_beyond():
    pool = BlockPool(8, DeviceBlockId)
    blocks = pool.allocate(6)
    pool.retire_from(4)
    assert (pool.num_available, pool.num_leaving, pool.num_usable) == (-2, 2, 4)
    with pytest.raises(BrokenInvariantError, match=r"resize\(4\) with blocks in use beyond"):
        pool.resize(4)
    with pytest.raises(BrokenInvariantError, match=r"resize\(3\) with blocks in use beyond"):
        pool.resize(3)
    pool.drop(blocks[2:])
    assert (pool.num_available, pool.num_leaving) == (2, 0)
    pool.resize(4)
    assert pool.allocate(2) == [2, 3]
    pool.resize(6)
    assert pool.allocate(2) == [4, 5]
