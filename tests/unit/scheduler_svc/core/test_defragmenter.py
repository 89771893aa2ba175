"""Examples of defragmentation: the step in which each block moves, and its target."""

from core_driver import ROUTER, answer, grown, make_core, new, schedule, submit

from scheduler_svc.core.invariants import check


def renamed(plan) -> dict[int, int]:
    sources, targets = plan.renamed_src_block_ids.tolist(), plan.renamed_dst_block_ids.tolist()
    return dict(zip(sources, targets, strict=True))


def copied(plan) -> list[tuple[int, int]]:
    sources, targets = plan.copy_src_block_ids.tolist(), plan.copy_dst_block_ids.tolist()
    return list(zip(sources, targets, strict=True))


def held(core) -> list[int]:
    return [block for block, count in enumerate(core.pool.ref_counts.tolist()) if count]


def make_scattered(**overrides):
    """Three prompts of two blocks each; the first two have just ended."""
    settings = {"enable_prefix_caching": False, "defragment_interval_s": 0.0}
    core = make_core(num_blocks=12, **(settings | overrides))
    for key in range(3):
        submit(core, key, [10 * key + i for i in range(5)], max_tokens=12)
    plan = schedule(core)
    assert [blocks for _, _, blocks in new(plan)] == [[0, 1], [2, 3], [4, 5]]
    answer(core, plan, 0, 1, 2)
    core.cancel(ROUTER, [0, 1])
    check(core)
    return core


def test_held_blocks_move_to_the_low_end_and_leave_their_places_when_the_step_is_answered():
    core = make_scattered()
    assert held(core) == [4, 5]
    core.defragment()
    plan = schedule(core)
    assert renamed(plan) == {5: 0, 4: 1}
    assert copied(plan) == [(5, 0), (4, 1)]
    assert held(core) == [0, 1, 4, 5], "the step may still read the old places"
    following = schedule(core)
    assert (renamed(following), core.defragmenter.take_reports()) == ({}, ())
    answer(core, plan, 2)
    assert held(core) == [0, 1]
    core.schedule(0.0)
    (report,) = core.defragmenter.take_reports()
    assert (report.before.num_free_blocks, report.before.longest_free_run) == (10, 6)
    assert (report.num_moved_blocks, report.has_moved, report.after.rate) == (2, True, 0.0)
    load = core.load()
    assert (load.num_moved_blocks, load.num_defragmentations) == (2, 1)
    core.schedule(0.0)
    assert core.defragmenter.take_reports() == ()
    assert core.defragmenter.due == float("inf"), "nothing is left to do"


def test_a_pass_that_has_nothing_to_move_ends_at_once():
    core = make_core(defragment_interval_s=0.0)
    core.defragment()
    assert core.schedule(0.0) is None
    (report,) = core.defragmenter.take_reports()
    assert (report.has_moved, report.num_moved_blocks) == (True, 0)


def test_a_pass_that_is_requested_during_another_follows_it():
    core = make_scattered(max_defragment_moves=1)
    core.defragment()
    plan = schedule(core)
    core.defragment()
    for _ in range(4):
        following = schedule(core)
        answer(core, plan, 2)
        plan = following
    moved = [report.num_moved_blocks for report in core.defragmenter.take_reports()]
    assert moved == [2, 0]


def test_the_table_follows_its_blocks():
    core = make_scattered()
    core.defragment()
    plan = schedule(core)
    answer(core, plan, 2)
    core.cancel(ROUTER, [2])
    check(core)
    assert held(core) == []


def test_a_step_moves_no_more_than_it_may():
    core = make_scattered(max_defragment_moves=1)
    core.defragment()
    first, second = schedule(core), schedule(core)
    assert (renamed(first), renamed(second)) == ({5: 0}, {4: 1})


def test_a_table_that_grows_meanwhile_may_have_taken_the_place():
    core = make_scattered(max_defragment_moves=1)
    plans = [schedule(core), schedule(core)]
    answer(core, plans[0], 2)
    core.defragment()
    plans.append(schedule(core))
    assert renamed(plans[-1]) == {5: 0}
    answer(core, plans[1], 2)
    plan = schedule(core)
    assert grown(plan) == {2: 1}
    assert renamed(plan) == {4: 2}, "lower still than where it was"


def test_a_block_that_goes_before_its_turn_is_left_alone():
    core = make_scattered(max_defragment_moves=1)
    core.defragment()
    first = schedule(core)
    core.cancel(ROUTER, [2])  # only the step in flight holds its blocks
    second = schedule(core)
    assert renamed(second) == {}
    answer(core, first, 2)
    answer(core, second)
    assert held(core) == []
    assert core.schedule(0.0) is None
    assert [report.num_moved_blocks for report in core.defragmenter.take_reports()] == [1]


def test_what_starts_meanwhile_and_shares_a_block_keeps_it_where_it_is():
    core = make_scattered(max_defragment_moves=1, enable_prefix_caching=True)
    core.defragment()
    schedule(core)
    submit(core, 3, [20 + i for i in range(5)])  # shares the first block of 2
    plan = schedule(core)
    assert new(plan)[0][2][0] == 4
    assert renamed(plan) == {}


def test_a_block_that_another_sequence_has_found_meanwhile_is_not_moved_for_the_first():
    core = make_core(num_blocks=12, defragment_interval_s=0.0, max_defragment_moves=1)
    for key in range(3):
        prompt = [10 * key + i for i in range(5)]
        submit(core, key, prompt, max_tokens=12, reads_prefix_cache=key < 2)
    answer(core, schedule(core), 0, 1, 2)
    core.cancel(ROUTER, [0, 1])
    core.defragment()
    plan = schedule(core)
    assert renamed(plan) == {5: 1}, "and block 4 would be next"
    (seq,) = core.live
    core.preemption.preempt(seq)
    answer(core, plan)
    submit(core, 3, [20 + i for i in range(5)], max_tokens=12)
    plan = schedule(core)
    assert [blocks for _, _, blocks in new(plan)] == [[1, 3], [4, 5]]
    assert renamed(plan) == {}


def test_free_places_are_taken_before_cached_ones():
    core = make_scattered(enable_prefix_caching=True)
    assert core.load().num_cached_blocks == 2, "the full first block of each that ended"
    core.defragment()
    plan = schedule(core)
    assert renamed(plan) == {5: 1, 4: 0}, "0 and 2 are cached"
    assert copied(plan) == [(5, 1), (4, 0), (0, 4)]
    assert core.load().num_moved_blocks == 3


def test_no_block_changes_places_with_a_cached_one_beyond_it():
    core = make_core(num_blocks=12, defragment_interval_s=0.0, max_defragment_moves=1)
    for key in range(3):
        submit(core, key, [10 * key + i for i in range(5)], max_tokens=1 + 11 * (key == 1))
    answer(core, schedule(core), 0, 1, 2)  # now 0 and 4 are cached, and sequence 1 holds 2 and 3
    core.defragment()
    plan = schedule(core)
    assert renamed(plan) == {3: 1}
    submit(core, 3, range(5))
    following = schedule(core)
    assert new(following)[0][2][0] == 0, "the place for block 2"
    assert renamed(following) == {}
    answer(core, plan, 1)
    answer(core, following, 1, 0)
    schedule(core)
    assert len(core.defragmenter.take_reports()) == 1


def test_a_held_block_and_a_cached_one_change_places_and_are_found_there():
    core = make_core(num_blocks=4, defragment_interval_s=0.0)
    submit(core, 0, range(8), max_tokens=1)
    submit(core, 1, range(50, 57), max_tokens=4)
    plan = schedule(core)
    assert [blocks for _, _, blocks in new(plan)] == [[0, 1], [2, 3]]
    answer(core, plan, 0, 1)  # 0 has ended: its blocks are cached
    core.defragment()
    plan = schedule(core)
    assert renamed(plan) == {3: 0, 2: 1}
    assert copied(plan) == [(3, 0), (0, 3), (2, 1), (1, 2)]
    assert core.load().num_moved_blocks == 4
    answer(core, plan, 1)
    submit(core, 2, [*range(8), 8], max_tokens=1)
    core.cancel(ROUTER, [1])
    while not (started := new(plan := schedule(core))):
        answer(core, plan)
    ((_, num_computed, blocks),) = started
    assert (num_computed, blocks[:2]) == (8, [3, 2])


def test_a_pinned_block_moves_and_stays_pinned():
    core = make_core(num_blocks=4, defragment_interval_s=0.0, max_pinned_share=0.5)
    submit(core, 0, range(4), max_tokens=1)
    submit(core, 1, range(50, 54), max_tokens=1, cache_pin_s=5.0)
    answer(core, schedule(core), 0, 1)
    answer(core, schedule(core))
    assert held(core) == [1]
    core.defragment()
    plan = schedule(core)
    assert renamed(plan) == {1: 0}
    answer(core, plan)
    assert (held(core), core.load().num_pinned_blocks) == ([0], 1)
    core.schedule(now=6.0)
    check(core)
    assert core.load().num_pinned_blocks == 0


def test_a_block_that_a_fork_copies_from_stays_where_it_is():
    core = make_core(num_blocks=8, max_num_batched_tokens=8, defragment_interval_s=0.0)
    submit(core, 0, range(60, 64), max_tokens=1)
    submit(core, 1, [1, 2], n=2, max_tokens=6)
    plan = schedule(core)
    answer(core, plan, 0, 1)
    core.defragment()
    plan = schedule(core)  # the fork's own copy of block 1 is made in this step
    forks = [blocks for _, _, blocks in new(plan)]
    assert copied(plan)[0] == (1, forks[0][-1])
    assert 1 not in renamed(plan)
    assert forks[0][-1] not in renamed(plan), "it is written by this very list"


def test_fragmentation_is_looked_at_in_intervals_and_mended_from_a_threshold_on():
    core = make_scattered(defragment_interval_s=10.0, defragment_threshold=0.4)
    core.defragmenter.take_reports()
    plan = schedule(core, now=9.0)
    assert (renamed(plan), core.defragmenter.take_reports()) == ({}, ())
    answer(core, plan, 2)
    assert renamed(schedule(core, now=11.0)) != {}


def test_below_the_threshold_it_is_only_reported():
    core = make_scattered(defragment_interval_s=10.0, defragment_threshold=0.41)
    assert [report.has_moved for report in core.defragmenter.take_reports()] == [False]
    assert renamed(schedule(core, now=11.0)) == {}
    (report,) = core.defragmenter.take_reports()
    assert (report.has_moved, report.before.rate, report.after.rate) == (False, 0.4, 0.4)
    assert report.num_moved_blocks == 0


def test_by_default_nothing_moves():
    core = make_scattered(defragment_interval_s=1.0)
    core.defragmenter.take_reports()
    assert renamed(schedule(core, now=5.0)) == {}
    assert not core.defragmenter.take_reports()[0].has_moved
