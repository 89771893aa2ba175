"""Beam searches in the block space by example: the rows and blocks of each beam."""

from dataclasses import replace

import numpy as np
import pytest
from core_driver import ROUTER, answer, chunks, make_core, new, schedule, submit

from contract.arrays import ints
from contract.step import Plan, Result
from quire.v1 import kv_pb2
from scheduler_svc.core.interface.errors import MigrationRefusedError, RequestTooLongError
from scheduler_svc.core.interface.events import StepEvents
from scheduler_svc.core.interface.request import BeamParams, FinishReason, Request, SeqKey
from scheduler_svc.core.invariants import check
from scheduler_svc.core.reports.describe import Query, describe
from scheduler_svc.core.reports.load import count_queued
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SeqStatus
from scheduler_svc.wire.reports import kv_to_proto

LIKELY = {0: -0.1, 1: -0.2, 2: -3.0, 3: -9.0}
"""The candidates after any token; they make both beams children of the best one."""


def search(
    core: Scheduler,
    key: int,
    prompt,
    *,
    width: int = 2,
    max_tokens: int = 8,
    n: int = 1,
    cache_pin_s: float | None = None,
    end_token_ids: tuple[int, ...] = (),
):
    request = Request(
        source=ROUTER,
        first_seq_key=SeqKey(key),
        request_id=f"search-{key}",
        prompt_token_ids=np.array(prompt, np.int32),
        n=n,
        max_tokens=max_tokens,
        sampling=b"",
        beam=BeamParams(width, end_token_ids),
        cache_pin_s=cache_pin_s,
    )
    core.submit(request, now=float(key))
    check(core)


def report(core: Scheduler, plan: Plan, **rows: dict[int, float]) -> StepEvents:
    """Each named row, as in `r0={7: -0.5}`, reports these candidates."""
    by_row = {int(name.removeprefix("r")): likely for name, likely in rows.items()}
    likely = list(by_row.values())
    outcome = Result(
        plan.step_id,
        sampled_rows=ints(list(by_row)),
        sampled_token_ids=ints([next(iter(each)) for each in likely]),
        stopped_rows=ints([]),
        failed_rows=ints([]),
        candidate_rows=ints(list(by_row)),
        candidate_counts=ints([len(each) for each in likely]),
        candidate_token_ids=ints([token for each in likely for token in each]),
        candidate_logprobs=np.array([p for each in likely for p in each.values()], np.float32),
    )
    news = core.update(outcome)
    check(core)
    return news


def tokens(plan: Plan) -> list[list[int]]:
    return [new.token_ids.tolist() for new in plan.new_sequences]


def copies(plan: Plan) -> list[tuple[int, int]]:
    return list(zip(plan.copy_src_block_ids, plan.copy_dst_block_ids, strict=True))


def test_the_prompt_of_a_search_is_pinned_once():
    core = make_core()
    search(core, 0, range(9), cache_pin_s=10.0)
    plan = schedule(core)
    assert [(pin.seq_key, pin.num_tokens) for pin in report(core, plan, r0=LIKELY).pinned] == [
        (0, 8)
    ]
    plan = schedule(core)
    assert report(core, plan, r0=LIKELY, r1=LIKELY).pinned == ()
    assert core.load().num_pinned_blocks == 2


def test_when_a_search_resumes_its_leader_alone_pins_the_prompt():
    core = make_core()
    search(core, 0, range(9), cache_pin_s=10.0)
    report(core, schedule(core), r0=LIKELY)
    plan = schedule(core)
    core.preemption.preempt(next(iter(core.beams)).leader)
    answer(core, plan)
    plans = schedule(core), schedule(core)
    assert all(plan.new_sequences for plan in plans), "the best beam, then the other"
    assert [pin.seq_key for plan in plans for pin in answer(core, plan).pinned] == [0]


def test_beams_share_full_blocks_and_copy_the_partial_one():
    core = make_core()
    search(core, 0, [1, 2, 3, 4, 5])
    first = schedule(core)
    assert (new(first), chunks(first), first.num_decodes) == ([(0, 0, [0, 1])], {0: 5}, 0)
    assert first.new_sequences[0].max_total_tokens == 6
    assert core.schedule(0.0) is None, "what goes on is not known before the prompt's candidates"

    news = report(core, first, r0=LIKELY)
    assert (news.seq_keys.size, news.finished) == (0, ())
    second = schedule(core)
    assert second.released_rows.tolist() == [0]
    assert tokens(second) == [[1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 5, 1]]
    assert new(second) == [(0, 5, [0, 1]), (1, 5, [0, 2])]
    assert (copies(second), chunks(second)) == ([(1, 2)], {0: 1, 1: 1})


def test_a_beam_without_a_child_gives_its_place_away():
    core = make_core()
    search(core, 0, [1, 2, 3, 4, 5])
    report(core, schedule(core), r0=LIKELY)
    third = schedule(core)
    report(core, third, r0={5: -9.0, 6: -9.1}, r1={7: -0.1, 8: -0.2})
    fourth = schedule(core)
    assert tokens(fourth) == [[1, 2, 3, 4, 5, 1, 7], [1, 2, 3, 4, 5, 1, 8]]
    # Row 1 continues in block 2. Row 0 now holds another beam, with a copy; its block 1 is reused.
    assert new(fourth) == [(1, 6, [0, 2]), (0, 6, [0, 1])]
    assert copies(fourth) == [(2, 1)]
    assert sorted(fourth.released_rows.tolist()) == [0, 1]


def test_the_places_of_a_search_without_a_beam_are_described_and_do_not_wait():
    core = make_core()
    search(core, 0, [1, 2, 3, 4, 5])
    first = schedule(core)
    described = kv_to_proto("w", describe(core, Query(max_sequences=10))).sequences
    assert [each.status for each in described] == [
        kv_pb2.SEQUENCE_STATUS_DECODE,
        kv_pb2.SEQUENCE_STATUS_SPARE,
    ]
    assert count_queued(core).total() == core.load().num_waiting == 0
    report(core, first, r0=LIKELY)


def test_at_a_border_each_beam_gets_a_block_and_nothing_is_copied():
    core = make_core()
    search(core, 0, [1, 2, 3, 4])
    report(core, schedule(core), r0=LIKELY)
    second = schedule(core)
    assert new(second) == [(0, 4, [0, 1]), (1, 4, [0, 2])]
    assert copies(second) == []


def test_beams_give_back_what_lies_behind_their_window():
    core = make_core(kv_windows=(8,), num_blocks=40)
    search(core, 0, range(8), max_tokens=30)
    report(core, schedule(core), r0=LIKELY)
    for _ in range(20):
        plan = schedule(core)
        report(core, plan, **{f"r{row}": {5: -1.0, 6: -9.0} for row in chunks(plan)})
    assert [len(core.groups.held(beam.block_ids)) for beam in core.running] == [2, 2]


def test_all_outputs_come_at_the_end_best_first():
    core = make_core()
    search(core, 5, [1, 2], max_tokens=2, n=2)
    assert report(core, schedule(core), r0=LIKELY).finished == ()
    news = report(core, schedule(core), r0={4: -1.0, 5: -2.0}, r1={6: -0.5, 7: -2.0})
    assert [(f.seq_key, f.reason, f.token_ids) for f in news.finished] == [
        (5, FinishReason.LENGTH, (1, 6)),
        (6, FinishReason.LENGTH, (0, 4)),
    ]
    assert [f.cumulative_logprob for f in news.finished] == pytest.approx([-0.7, -1.1])
    assert [a.seq_key for a in news.admitted] == []
    schedule(core)
    assert core.load().num_running == 0


def test_outputs_that_end_with_a_token_and_outputs_that_are_not_found():
    core = make_core()
    search(core, 5, [1, 2], n=3, width=3, max_tokens=2, end_token_ids=(9,))
    report(core, schedule(core), r0={9: -1.0, 4: -2.0})
    news = report(core, schedule(core), r0={5: -1.0})
    assert [(f.source, f.seq_key, f.reason, f.stop_token_id) for f in news.finished] == [
        (ROUTER, 5, FinishReason.STOP, 9),
        (ROUTER, 6, FinishReason.LENGTH, None),
        (ROUTER, 7, FinishReason.ERROR, None),
    ]


def test_the_worker_keeps_the_state_of_a_search_with_its_best_beam():
    core = make_core()
    search(core, 0, [1, 2, 3])
    plan = schedule(core)
    assert [each.search for each in plan.new_sequences] == [None]
    report(core, plan, r0=LIKELY)
    first, second = schedule(core).new_sequences
    assert len(first.search.beams) == 2
    assert second.search is None


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_blocks"), [(5, 1, 0), (5, 2, 2), (4, 1, 0), (4, 2, 3)]
)
def test_a_search_needs_blocks_for_its_beams_unless_they_end_with_the_next_token(
    num_prompt, max_tokens, num_blocks
):
    core = make_core()
    search(core, 0, range(num_prompt), width=3, max_tokens=max_tokens)
    schedule(core)
    (group,) = core.beams
    assert core.beams.demand(group) == (3, num_blocks)


def test_others_decode_meanwhile():
    core = make_core()
    submit(core, 0, [1, 2])
    search(core, 9, [1, 2, 3])
    first, second = schedule(core), schedule(core)
    assert (chunks(first), second.num_decodes, chunks(second)) == ({0: 2, 1: 3}, 1, {})
    outcome_rows = {"r0": {7: -1.0}, "r1": LIKELY}
    news = report(core, first, **outcome_rows)
    assert (news.seq_keys.tolist(), news.token_ids.tolist()) == ([0], [7])
    third = schedule(core)
    assert (third.num_decodes, chunks(third)) == (1, {1: 1, 2: 1})


def test_no_other_gets_the_rows_that_beams_will_need():
    core = make_core(max_num_seqs=3)
    search(core, 0, [1, 2], width=2)
    submit(core, 10, [3])
    submit(core, 11, [4])
    first = schedule(core)
    assert chunks(first) == {0: 2, 1: 1}
    report(core, first, r0=LIKELY, r1={7: -1.0})
    assert [s.row for s in schedule(core).new_sequences] == [0, 2]


@pytest.mark.parametrize(
    ("num_blocks", "num_rows", "starts"), [(6, 4, True), (5, 4, False), (6, 3, False)]
)
def test_a_search_waits_for_rows_and_blocks_for_all_its_beams(num_blocks, num_rows, starts):
    core = make_core(num_blocks, max_num_seqs=num_rows)
    submit(core, 0, [3, 4, 5, 6, 7])  # a row, 2 blocks
    search(core, 10, [1, 2, 3, 4, 5], width=3, max_tokens=4)  # 3 rows, 2 blocks, and 2 for copies
    assert chunks(schedule(core)) == ({0: 5, 1: 5} if starts else {0: 5})


@pytest.mark.parametrize(("num_blocks", "starts"), [(6, True), (5, False)])
def test_a_search_whose_prompt_fills_its_blocks_waits_for_a_block_for_each_beam(num_blocks, starts):
    core = make_core(num_blocks)
    submit(core, 0, [3, 4, 5, 6, 7])  # 2 blocks
    search(core, 10, [1, 2, 3, 4], width=3, max_tokens=4)  # a block, and 3 for the next tokens
    assert chunks(schedule(core)) == ({0: 5, 1: 4} if starts else {0: 5})


def test_a_search_is_preempted_and_resumes_as_a_whole():
    core = make_core(num_blocks=5, enable_prefix_caching=False)
    submit(core, 0, [3, 4, 5], max_tokens=12)
    search(core, 10, [1, 2, 3, 4, 5], max_tokens=8)
    plan = schedule(core)
    assert new(plan) == [(0, 0, [0]), (1, 0, [1, 2])]
    report(core, plan, r0={7: -1.0}, r1=LIKELY)
    for _ in range(3):  # sequence 0 takes the last block, and the beams fill theirs
        plan = schedule(core)
        report(core, plan, r0={7: -1.0}, r1={5: -1.0, 6: -9.0}, r2={5: -1.0, 6: -9.0})
    assert core.load().num_free_blocks == 0
    plan = schedule(core)
    load = core.load()
    assert (load.num_running, load.num_waiting, load.num_preemptions) == (1, 1, 1)
    assert (sorted(plan.released_rows), chunks(plan), plan.num_decodes) == ([1, 2], {}, 1)
    assert load.num_free_blocks == 3
    answer(core, plan, 0, stopped=[0])

    plan = schedule(core)
    assert tokens(plan) == [[1, 2, 3, 4, 5, 0, 5, 5, 5]]
    ((best, _, _),) = new(plan)
    report(core, plan, **{f"r{best}": LIKELY})
    plan = schedule(core)
    assert tokens(plan) == [[1, 2, 3, 4, 5, 1, 5, 5, 5]]
    assert [num_computed for _, num_computed, _ in new(plan)] == [4]


def test_what_resumes_shares_what_it_has_in_common():
    core = make_core(num_blocks=16, enable_prefix_caching=False)
    search(core, 0, [1, 2, 3, 4, 5, 6], max_tokens=6)
    report(core, schedule(core), r0=LIKELY)
    plan = schedule(core)
    group = next(iter(core.beams))
    core.preemption.preempt(group.leader)
    check(core)
    assert core.load().num_waiting == 1
    assert answer(core, plan, 0, 1).seq_keys.size == 0, "what was under way is void"

    resumed = schedule(core)
    assert tokens(resumed) == [[1, 2, 3, 4, 5, 6, 0]]
    ((row, num_computed, blocks),) = new(resumed)
    assert (num_computed, chunks(resumed)) == (0, {row: 7})
    others = schedule(core)
    assert tokens(others) == [[1, 2, 3, 4, 5, 6, 1]]
    ((other, num_computed, other_blocks),) = new(others)
    assert (num_computed, chunks(others)) == (4, {other: 3})
    assert other_blocks[0] == blocks[0]
    assert core.load().num_recomputed_tokens == 6 + 2
    # The search continues when both beams have reported, in either order.
    report(core, resumed, **{f"r{row}": {5: -0.1, 4: -9.0}})
    report(core, others, **{f"r{other}": {6: -0.1, 4: -9.0}})
    assert tokens(schedule(core)) == [[1, 2, 3, 4, 5, 6, 0, 5], [1, 2, 3, 4, 5, 6, 1, 6]]


def test_a_search_that_resumes_has_as_many_tokens_to_compute_again_as_it_had_computed():
    core = make_core(enable_prefix_caching=False, max_num_batched_tokens=4, max_num_seqs=4)
    search(core, 0, range(10))
    plan = schedule(core)
    core.preemption.preempt(next(iter(core.beams)).leader)
    check(core)
    answer(core, plan)
    schedule(core)
    assert core.load().num_recomputed_tokens == 4, "of ten"


def test_a_search_left_with_one_beam_that_is_not_its_leader_resumes():
    core = make_core(enable_prefix_caching=False)
    search(core, 0, [1, 2], end_token_ids=(9,))
    report(core, schedule(core), r0=LIKELY)
    report(core, schedule(core), r0={9: -0.1}, r1={5: -0.1})
    plan = schedule(core)
    assert tokens(plan) == [[1, 2, 1, 5]]
    report(core, plan, r1={6: -0.1})
    plan = schedule(core)
    core.preemption.preempt(next(iter(core.beams)).leader)
    check(core)
    answer(core, plan)
    assert tokens(schedule(core)) == [[1, 2, 1, 5, 6]]
    assert core.load().num_recomputed_tokens == 4


def test_beams_that_resume_share_the_full_blocks_before_their_last_token():
    core = make_core(enable_prefix_caching=False, max_num_batched_tokens=4, max_num_seqs=3)
    search(core, 0, [1, 2, 3, 4], width=3)
    report(core, schedule(core), r0=LIKELY)
    plan = schedule(core)
    (group,) = core.beams
    core.preemption.preempt(group.leader)
    answer(core, plan)
    assert core.beams.demand(group) == (3, 2)
    plan = schedule(core)
    assert core.beams.num_blocks_due == 0, "the best beam is not computed yet"
    schedule(core)
    assert core.beams.num_blocks_due == 2
    answer(core, plan)
    assert [num_computed for _, num_computed, _ in new(schedule(core))] == [4, 4]


def test_a_beam_that_resumes_finds_its_own_blocks():
    core = make_core(enable_prefix_caching=True)
    search(core, 0, [1, 2, 3, 4])
    report(core, schedule(core), r0=LIKELY)
    for _ in range(4):  # the second beam becomes the best
        plan = schedule(core)
        report(core, plan, r0={5: -1.0, 8: -9.0}, r1={5: -0.1, 8: -9.0})
    plan = schedule(core)
    assert tokens(plan) == [[1, 2, 3, 4, 1, 5, 5, 5, 5], [1, 2, 3, 4, 0, 5, 5, 5, 5]]
    before = {int(each.token_ids[4]): each.block_ids[:2].tolist() for each in plan.new_sequences}
    (group,) = core.beams
    core.preemption.preempt(group.leader)
    assert core.beams.demand(group) == (2, 2), "one of three blocks is shared"
    answer(core, plan)
    resumed = [*schedule(core).new_sequences, *schedule(core).new_sequences]
    assert {int(each.token_ids[4]): each.block_ids[:2].tolist() for each in resumed} == before


def test_a_search_cancelled_in_its_prompt_leaves_the_rows_of_its_beams():
    core = make_core()
    search(core, 0, [1, 2, 3])
    search(core, 5, [1, 2, 4])
    plan = schedule(core)
    assert core.beams.rows == {0, 1}
    core.cancel(ROUTER, [0])
    check(core)
    assert core.beams.rows == {1}
    report(core, plan, r0=LIKELY, r1=LIKELY)
    assert tokens(schedule(core)) == [[1, 2, 4, 0], [1, 2, 4, 1]]


def test_the_place_of_a_beam_without_a_child_is_free_at_once():
    core = make_core(enable_prefix_caching=False)
    submit(core, 0, [9], max_tokens=20)
    search(core, 5, [1, 2, 3, 4, 5])
    report(core, schedule(core), r0={7: -1.0}, r1=LIKELY)
    plan = schedule(core)
    schedule(core)  # of sequence 0, while the beams are computed
    report(core, plan, r0={7: -1.0}, r1={5: -9.0, 6: -9.1}, r2={7: -0.1, 8: -0.2})
    assert [row for row, _, _ in new(schedule(core))] == [2, 1]


@pytest.mark.parametrize(("policy", "charged"), [("fair", {"": 3 + 2 * 1 + 2 * 2}), ("fcfs", {})])
def test_an_account_is_charged_for_each_beam_of_a_step(policy, charged):
    core = make_core(policy=policy)
    search(core, 0, [1, 2, 3])
    report(core, schedule(core), r0=LIKELY)
    report(core, schedule(core), r0=LIKELY, r1=LIKELY)
    assert core.policy.accounts() == charged


def test_an_account_is_charged_once_for_the_prompt_of_a_search():
    core = make_core(policy="fair", enable_prefix_caching=False)
    search(core, 0, [1, 2, 3, 4, 5, 6])
    report(core, schedule(core), r0=LIKELY)
    plan = schedule(core)
    core.preemption.preempt(next(iter(core.beams)).leader)
    answer(core, plan)
    schedule(core)
    assert chunks(schedule(core)) == {0: 3}, "of the prompt, two tokens are computed again"
    assert core.policy.num_served("") == 6 + 2


def test_with_windows_beams_that_resume_are_not_expected_to_share_blocks():
    core = make_core(32, kv_windows=(8, None), enable_prefix_caching=False)
    assert core.beams.num_blocks_due == 0
    search(core, 0, [1, 2, 3, 4, 5, 6], width=3)
    plan = schedule(core)
    (group,) = core.beams
    assert core.beams.demand(group) == (3, 2 * 2), "a copy for each of two beams, in each KV group"
    report(core, plan, r0=LIKELY)
    assert core.beams.num_blocks_due == 2 * 2
    plan = schedule(core)
    assert core.beams.num_blocks_due == 0
    core.preemption.preempt(group.leader)
    answer(core, plan)
    assert core.beams.demand(group) == (3, 2 * 4), "two beams, two blocks in each KV group"
    plan = schedule(core)
    assert core.beams.num_blocks_due == 2 * 4
    schedule(core)
    assert core.beams.num_blocks_due == 0


def test_a_cancel_of_one_output_is_one_of_all():
    core = make_core()
    search(core, 0, [1, 2, 3], n=2)
    first = schedule(core)
    report(core, first, r0=LIKELY)
    schedule(core)
    ends = core.cancel(ROUTER, [1, 0])
    assert [(end.seq_key, end.reason) for end in ends] == [
        (0, FinishReason.CANCELLED),
        (1, FinishReason.CANCELLED),
    ]
    check(core)
    assert core.cancel(ROUTER, [0, 1]) == ()


def test_a_beam_that_cannot_sample_ends_its_search():
    core = make_core()
    search(core, 0, [1, 2, 3], n=2)
    report(core, schedule(core), r0=LIKELY)
    news = answer(core, schedule(core), failed=[1])
    assert [(f.seq_key, f.reason) for f in news.finished] == [
        (0, FinishReason.ERROR),
        (1, FinishReason.ERROR),
    ]


def test_a_search_of_a_lost_worker_starts_over():
    core = make_core()
    search(core, 0, [1, 2, 3], n=2)
    report(core, schedule(core), r0=LIKELY)
    schedule(core)
    (request,) = core.drain()
    assert [(o.token_ids.tolist(), o.finished) for o in request.outputs] == [([], False)] * 2
    core = make_core()
    core.submit(request, now=0.0)
    assert tokens(schedule(core)) == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"max_num_seqs": 3}, "the beam width is 4; at most 3 sequences run at once"),
        ({"num_blocks": 8}, "4 beams .* may take 9 blocks; there are 8"),
    ],
)
def test_a_search_that_could_never_go_on_is_refused(overrides, problem):
    core = make_core(**overrides)
    with pytest.raises(RequestTooLongError, match=problem):
        search(core, 0, [1, 2, 3, 4, 5], width=4, max_tokens=8)
    # One block of prompt is shared; positions 4 to 11 are in two more, for each beam.
    search(make_core(num_blocks=9), 0, [1, 2, 3, 4, 5], width=4, max_tokens=8)


@pytest.mark.parametrize(
    ("max_tokens", "kv_windows", "num_blocks"),
    [
        (1, (None,), 2),  # all beams end with the first token
        (2, (None,), 1 + 4),  # a block of prompt is shared
        (4, (None,), 1 + 4),  # the eighth token is the last that is computed
        (5, (None,), 1 + 4 * 2),
        (8, (None, None), 1 + 4 * 2 * 4),  # a null block; with groups nothing is shared
    ],
)
def test_a_search_is_taken_with_as_many_blocks_as_it_may_need(max_tokens, kv_windows, num_blocks):
    def take(num_blocks):
        core = make_core(num_blocks, kv_windows=kv_windows)
        search(core, 0, [1, 2, 3, 4, 5], width=4, max_tokens=max_tokens)

    take(num_blocks)
    with pytest.raises(RequestTooLongError):
        take(num_blocks - 1)


def test_eight_outputs_of_a_long_prompt_take_hardly_more_than_one():
    assert most_blocks_held(n=8) < 1.3 * most_blocks_held(n=1)


def most_blocks_held(n: int) -> int:
    core = make_core(256, block_size=16, max_model_len=4096, max_num_batched_tokens=4096)
    submit(core, 0, range(2048), n=n, max_tokens=32)
    most = 0
    while (plan := core.schedule(0.0)) is not None:
        load = core.load()
        most = max(most, load.num_blocks - load.num_free_blocks - load.num_cached_blocks)
        sampling = [seq.row for seq in core.live if seq.status is SeqStatus.DECODE]
        answer(core, plan, *sampling)
    assert core.load().num_running == core.load().num_waiting == 0
    return most


def test_a_search_does_not_migrate():
    core = Scheduler(replace(make_core().config, num_host_blocks=8))
    search(core, 0, [1, 2, 3], n=2)
    schedule(core)
    with pytest.raises(MigrationRefusedError, match="it is a beam search"):
        core.begin_export(ROUTER, SeqKey(0))
    check(core)


def test_beams_are_not_paced_as_their_long_prompt_was():
    core = make_core(num_blocks=32, long_prefill_threshold=4)
    search(core, 0, range(20))
    report(core, schedule(core), r0=LIKELY)
    submit(core, 5, [1, 2])
    report(core, schedule(core), r0={5: -1.0}, r1={6: -1.0}, r2={7: -1.0})
    plan = core.schedule(0.0, max_paced_tokens=0)
    assert (plan.num_decodes, sorted(plan.chunk_lens)) == (1, [1, 1])
