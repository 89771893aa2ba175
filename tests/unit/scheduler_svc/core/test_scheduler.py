"""Examples of the scheduler core, with exact blocks and steps."""

import hashlib
import struct
from dataclasses import replace

import numpy as np
import pytest
from core_driver import ROUTER, answer, chunks, grown, make_core, new, schedule, submit

from contract.hashing import extend_chain, root_hash
from contract.step import Result, StepId
from scheduler_svc.core.interface.errors import (
    BrokenInvariantError,
    QueueFullError,
    RequestTooLongError,
    TooManySequencesError,
)
from scheduler_svc.core.interface.events import Preempted, Started
from scheduler_svc.core.interface.request import FinishReason, OutputSoFar
from scheduler_svc.core.invariants import check
from scheduler_svc.core.sequence import SeqStatus


def test_a_prompt_is_computed_then_decodes_until_its_length():
    core = make_core()
    submit(core, 5, [1, 2, 3, 4, 5], max_tokens=3)
    first = schedule(core, now=7.0)
    assert new(first) == [(0, 0, [0, 1])]
    assert (chunks(first), first.num_decodes) == ({0: 5}, 0)
    second = schedule(core)  # before the first result is known
    assert (chunks(second), second.num_decodes) == ({}, 1)
    assert core.schedule(0.0) is None, "two steps are in flight"

    events = answer(core, first, 0)
    assert [(a.seq_key, a.num_cached_tokens, a.queue_s) for a in events.admitted] == [(5, 0, 2.0)]
    assert (events.seq_keys.tolist(), events.token_ids.tolist()) == ([5], [7])
    third = schedule(core)
    assert third.num_decodes == 1
    answer(core, second, 0)
    assert core.schedule(0.0) is None, "it has its length when the third step is done"
    events = answer(core, third, 0)
    assert [(f.seq_key, f.reason) for f in events.finished] == [(5, FinishReason.LENGTH)]
    assert schedule(core).released_rows.tolist() == [0]


def test_a_table_grows_in_the_step_that_crosses_the_border():
    core = make_core()
    submit(core, 0, [1, 2, 3])
    plans = [schedule(core)]
    growth = []
    for _ in range(6):
        plans.append(schedule(core))
        growth.append(grown(plans[-1]))
        answer(core, plans[-2], 0)
    # positions 3, 4, 5, 6, 7, 8: blocks of four
    assert growth == [{}, {0: 1}, {}, {}, {}, {0: 2}]


def test_a_table_does_not_grow_for_a_step_after_the_last():
    core = make_core()
    submit(core, 0, [1, 2, 3], max_tokens=6)  # its last token, at position 8, is not computed
    submit(core, 1, [4], max_tokens=20)
    plans = [schedule(core)]
    growth = []
    for _ in range(6):
        plans.append(schedule(core))
        growth += grown(plans[-1])
        answer(core, plans[-2], 0, 1)
    assert growth == [0, 1]


def test_a_long_prompt_is_computed_in_chunks_and_others_decode_meanwhile():
    core = make_core(max_num_batched_tokens=8)
    submit(core, 0, [1, 2])
    submit(core, 1, range(20))
    first, second = schedule(core), schedule(core)
    assert chunks(first) == {0: 2, 1: 6}
    assert (second.num_decodes, chunks(second)) == (1, {1: 7})
    answer(core, first, 0)
    assert chunks(schedule(core)) == {1: 7}


def test_what_is_left_of_a_half_computed_prompt_counts_as_queued():
    core = make_core(max_prefill_chunk=4, max_num_seqs=1)
    submit(core, 0, range(10))
    submit(core, 1, range(20, 25))
    schedule(core)
    assert core.num_queued_tokens == 6 + 5


def test_what_is_cached_of_a_prompt_does_not_count_as_queued():
    core = make_core()
    submit(core, 0, range(9), max_tokens=1)
    answer(core, schedule(core), 0)
    submit(core, 1, [*range(8), 1, 2], max_tokens=1)
    assert core.num_queued_tokens == 2
    schedule(core)
    assert core.num_queued_tokens == 0


def test_equal_prompts_that_arrive_together_are_computed_once():
    core = make_core()
    submit(core, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    submit(core, 1, [1, 2, 3, 4, 5, 6, 7, 8, 10])
    plan = schedule(core)
    assert new(plan) == [(0, 0, [0, 1, 2]), (1, 8, [0, 1, 3])]
    assert chunks(plan) == {0: 9, 1: 1}


def test_the_whole_prompt_found_still_computes_its_last_block():
    core = make_core()
    submit(core, 0, [1, 2, 3, 4, 5, 6, 7, 8])
    submit(core, 1, [1, 2, 3, 4, 5, 6, 7, 8])
    assert new(schedule(core)) == [(0, 0, [0, 1]), (1, 4, [0, 2])]


def test_the_load_tells_how_much_was_looked_up_and_found():
    core = make_core()
    submit(core, 0, range(9), max_tokens=1)
    answer(core, schedule(core), 0)
    submit(core, 1, range(10), max_tokens=1)
    schedule(core)
    assert (core.load().prefix_cache_queries, core.load().prefix_cache_hits) == (19, 8)


def test_a_row_has_an_owner_until_its_sequence_ends():
    core = make_core()
    submit(core, 5, [1, 2], max_tokens=1)
    plan = schedule(core)
    assert core.owner(0) == (ROUTER, 5)
    answer(core, plan, 0)
    assert core.owner(0) is None


def test_another_salt_finds_nothing():
    core = make_core()
    submit(core, 0, [1, 2, 3, 4, 5])
    submit(core, 1, [1, 2, 3, 4, 5], salt="tenant")
    assert new(schedule(core)) == [(0, 0, [0, 1]), (1, 0, [2, 3])]


@pytest.mark.parametrize("kv_windows", [(None,), (None, 8)])
@pytest.mark.parametrize(("max_tokens", "num_found"), [(5, 4), (6, 8)])
def test_generated_tokens_are_found_by_the_next_turn(kv_windows, max_tokens, num_found):
    core = make_core(kv_windows=kv_windows)
    submit(core, 0, [1, 2, 3], max_tokens=max_tokens)
    plans = [schedule(core)]
    while (plan := core.schedule(0.0)) is not None:
        plans.append(plan)
        answer(core, plans[-2], 0)
    answer(core, plans[-1], 0)
    submit(core, 1, [1, 2, 3, 7, 7, 7, 7, 7, 7, 2])
    (_, num_computed, _) = new(schedule(core))[0]
    assert num_computed == num_found


def test_eviction_takes_the_oldest_sequence_first_and_its_tail_before_its_head():
    core = make_core(num_blocks=4)
    for key, prompt in enumerate(([1] * 8, [2] * 8)):  # two blocks each: 0 1, then 2 3
        submit(core, key, prompt, max_tokens=1)
        answer(core, schedule(core), 0)
        assert core.schedule(0.0) is not None  # the step tells the worker that the row was released
        core.update(Result(StepId(2 * key + 2), *[np.array([], np.int32)] * 4))
    assert core.load().num_cached_blocks == 4
    submit(core, 2, [3] * 4, max_tokens=1)
    assert new(schedule(core)) == [(0, 0, [1])], "the tail of the older"


def test_cached_blocks_without_enough_free_ones_are_not_taken():
    core = make_core(num_blocks=4)
    submit(core, 0, [1] * 8, max_tokens=8)
    first = schedule(core)
    answer(core, first, 0)
    submit(core, 1, [1] * 8 + [2] * 6, max_tokens=2)  # two found, two more needed, two free
    submit(core, 2, [5], max_tokens=1)
    before = [core.pool.ref_count(block) for block in range(4)]
    plan = schedule(core)  # sequence 0 takes one of the two free blocks to grow
    assert grown(plan) == {0: 2}
    assert not plan.new_sequences, "first come, first served: 2 does not overtake 1"
    assert [core.pool.ref_count(block) for block in range(4)] == [*before[:2], 1, 0]


def test_the_watermark_keeps_room_for_the_running_to_grow():
    core = make_core(num_blocks=4, watermark=0.5)
    submit(core, 0, [1] * 5, max_tokens=2)
    submit(core, 1, [2], max_tokens=2)
    assert [row for row, _, _ in new(schedule(core))] == [0]


def test_the_last_to_come_is_preempted_and_resumes_with_its_tokens():
    core = make_core(num_blocks=3)
    submit(core, 0, [1, 2, 3, 4], max_tokens=8)
    submit(core, 1, [5, 6, 7], max_tokens=8)
    plan = schedule(core)
    answer(core, plan, 0, 1)
    plan = schedule(core)
    assert grown(plan) == {0: 2}
    answer(core, plan, 0, 1)
    plan = schedule(core)  # sequence 1 needs a second block, none is free, and it came last
    assert core.load().num_preemptions == 1
    assert (plan.released_rows.tolist(), plan.num_decodes) == ([1], 1)
    for _ in range(20):
        if (events := answer(core, plan, 0)).finished:
            break
        plan = schedule(core)
    resumed = schedule(core).new_sequences[0]
    assert resumed.token_ids.tolist() == [5, 6, 7, 7, 7]
    assert resumed.num_prompt_tokens == 3
    assert [f.seq_key for f in events.finished] == [0]


@pytest.mark.parametrize("kv_windows", [(None,), (None, 8)])
def test_blocks_that_a_preempted_sequence_computes_again_can_be_found(kv_windows):
    core = make_core(kv_windows=kv_windows)
    submit(core, 0, range(9))
    answer(core, schedule(core), 0)
    (seq,) = core.running
    core.preemption.preempt(seq)
    core.pool.forget(list(core.pool.books.cached))
    (resumed,) = new(plan := schedule(core))
    assert resumed[1] == 0
    answer(core, plan, resumed[0])
    submit(core, 1, range(9))
    assert [num_computed for _, num_computed, _ in new(schedule(core))] == [8]


def test_siblings_share_the_prompt_and_copy_its_last_block():
    core = make_core()
    submit(core, 0, [1, 2, 3, 4, 5, 6], n=3)
    first = schedule(core)
    assert new(first) == [(0, 0, [0, 1])]
    second = schedule(core)
    assert new(second) == [(1, 5, [0, 2]), (2, 5, [0, 3])]
    assert chunks(second) == {1: 1, 2: 1}
    assert second.copy_src_block_ids.tolist() == [1, 1]
    assert second.copy_dst_block_ids.tolist() == [2, 3]
    assert core.pool.ref_count(0) == 3


def test_each_sibling_is_reported_as_admitted_once():
    core = make_core()
    submit(core, 0, range(9), n=3)
    plan = schedule(core, now=2.0)
    admitted = answer(core, plan, 0).admitted
    assert [(a.seq_key, a.num_cached_tokens, a.queue_s) for a in admitted] == [
        (0, 0, 2.0),
        (1, 0, 2.0),
        (2, 0, 2.0),
    ]
    assert not answer(core, schedule(core), 0, 1, 2).admitted


def test_a_sibling_takes_over_when_the_first_is_cancelled():
    core = make_core()
    submit(core, 0, [1, 2, 3], n=2)
    core.cancel(ROUTER, [0])
    check(core)
    assert [s.output_index for s in schedule(core).new_sequences] == [1]


def test_a_token_after_the_stop_is_dropped_and_blocks_wait_for_the_step_in_flight():
    core = make_core(num_blocks=4, enable_prefix_caching=False)
    submit(core, 0, [1, 2, 3, 4, 5])
    first, second = schedule(core), schedule(core)
    events = answer(core, first, 0, stopped=[0])
    assert [(f.reason, f.stop_token_id) for f in events.finished] == [(FinishReason.STOP, 7)]
    assert core.load().num_free_blocks == 2, "step two may still write"
    events = answer(core, second, 0)
    assert events.seq_keys.tolist() == []
    assert core.load().num_free_blocks == 4


def test_blocks_of_rows_without_finite_logits_cannot_be_found():
    core = make_core()
    submit(core, 0, [1, 2, 3, 4, 5])
    (finished,) = answer(core, schedule(core), failed=[0]).finished
    assert finished.reason is FinishReason.ERROR
    assert "position 5" in (finished.error or "")
    submit(core, 1, [1, 2, 3, 4, 5])
    assert new(schedule(core))[0][1] == 0


@pytest.mark.parametrize("kv_windows", [(None,), (8,)])
def test_blocks_without_finite_logits_cannot_be_found_when_another_holder_stops(kv_windows):
    core = make_core(kv_windows=kv_windows)
    submit(core, 0, range(9))
    submit(core, 1, [*range(8), 3], max_tokens=2)
    answer(core, schedule(core), 1, failed=[0])
    assert answer(core, schedule(core), 1).finished
    submit(core, 2, range(9))
    assert [num_computed for _, num_computed, _ in new(schedule(core))] == [0]


def test_blocks_without_finite_logits_get_no_label():
    core = make_core()
    submit(core, 0, range(9))
    submit(core, 1, range(9), reads_prefix_cache=False)  # has blocks with equal content
    answer(core, schedule(core), 0, failed=[1])
    assert schedule(core).labelled_block_ids.size == 0


def test_a_cancelled_sequence_frees_its_blocks_within_two_steps():
    core = make_core(num_blocks=4, enable_prefix_caching=False)
    submit(core, 0, [1, 2, 3, 4, 5])
    plans = [schedule(core), schedule(core)]
    (finished,) = core.cancel(ROUTER, [0, 99])
    assert finished.reason is FinishReason.CANCELLED
    for plan in plans:
        assert answer(core, plan, 0).seq_keys.tolist() == []
    assert core.load().num_free_blocks == 4


def test_a_thousand_cancelled_requests_leave_every_block():
    core = make_core(num_blocks=64)
    rng = np.random.default_rng(0)
    rows_decoding: list[int] = []
    for key in range(1000):
        submit(core, key, rng.integers(0, 2, rng.integers(1, 30)), n=int(rng.integers(1, 4)))
        if (plan := core.schedule(0.0)) is not None:
            released = set(plan.released_rows.tolist())
            rows_decoding = [row for row in rows_decoding if row not in released]
            answer(core, plan, *rows_decoding)
        core.cancel_source(ROUTER)
    while (plan := core.schedule(0.0)) is not None:
        answer(core, plan)
    load = core.load()
    assert load.num_free_blocks + load.num_cached_blocks == load.num_blocks
    assert (load.num_running, load.num_waiting) == (0, 0)


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(64, 1), (1, 64), (30, 3)])
def test_a_request_that_can_never_fit_is_refused_with_the_limit(prompt_len, max_tokens):
    core = make_core(num_blocks=8, max_model_len=32 if prompt_len == 30 else 64)
    limit = core.max_request_len
    assert limit == 32
    with pytest.raises(
        RequestTooLongError, match=f"{prompt_len} tokens .* {max_tokens}; .* {limit}"
    ):
        submit(core, 0, [1] * prompt_len, max_tokens=max_tokens)


def test_an_output_without_tokens_left_is_taken_only_if_it_is_finished():
    tokens = np.array([7, 7], np.int32)
    done, other = OutputSoFar(tokens, finished=True), OutputSoFar(tokens[:1], finished=False)
    core = make_core()
    submit(core, 0, [1], max_tokens=2, n=2, outputs=(done, other))
    assert core.load().num_waiting == 1
    with pytest.raises(RequestTooLongError, match="output 1 has 2 tokens and is not finished"):
        submit(core, 10, [1], max_tokens=2, n=2, outputs=(done, replace(done, finished=False)))


def test_a_full_queue_refuses_and_says_how_full():
    core = make_core(max_waiting=2)
    submit(core, 0, [1], n=2)
    with pytest.raises(QueueFullError, match=r"2 sequences wait.*the limit is 2"):
        submit(core, 2, [1])


def test_a_full_queue_takes_a_request_that_was_accepted_before():
    core = make_core(max_waiting=1)
    submit(core, 0, [1])
    outputs = (OutputSoFar(np.array([7], np.int32), finished=False),) * 2
    submit(core, 1, [1], n=2, outputs=outputs)
    assert core.load().num_waiting == 3


def test_more_sequences_than_may_ever_wait_are_refused_for_good():
    core = make_core(max_waiting=2)
    with pytest.raises(TooManySequencesError, match=r"3 sequences; at most 2 may wait"):
        submit(core, 0, [1], n=3)


def test_a_result_out_of_order_is_a_bug():
    core = make_core()
    submit(core, 0, [1])
    schedule(core)
    second = schedule(core)
    with pytest.raises(BrokenInvariantError, match=r"result of step 2; in flight: \[1, 2\]"):
        answer(core, second, 0)


def test_a_lost_workers_requests_come_back_with_their_tokens():
    core = make_core()
    submit(core, 0, [1, 2], n=2)
    first, second = schedule(core), schedule(core)
    answer(core, first, 0)
    answer(core, second, 0, 1)
    core.cancel(ROUTER, [1])
    (request,) = core.drain()
    assert [(o.token_ids.tolist(), o.finished) for o in request.outputs] == [
        ([7, 7], False),
        ([], True),
    ]

    other = make_core()
    other.submit(request, 0.0)
    (resumed,) = schedule(other).new_sequences
    assert resumed.token_ids.tolist() == [1, 2, 7, 7]
    assert resumed.max_total_tokens == 10


def test_the_block_hash_is_what_its_docstring_says():
    parent = hashlib.sha256(b"quire.v1.prefix\0" + "größe".encode()).digest()
    expected = []
    for block in ([1, 2], [3, 70_000]):
        parent = hashlib.sha256(parent + struct.pack("<2i", *block)).digest()
        expected.append(parent)
    chain = []
    extend_chain(chain, root_hash("größe"), np.array([1, 2, 3], np.int32), 2)
    extend_chain(chain, root_hash("größe"), np.array([1, 2, 3, 70_000, 5], np.int32), 2)
    assert chain == expected


def test_an_output_whose_form_cannot_be_followed_ends_and_its_blocks_stay_findable():
    core = make_core()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    submit(core, 0, prompt, max_tokens=5)
    events = answer(core, schedule(core), stuck_rows=[0])
    (finished,) = events.finished
    assert finished.reason is FinishReason.ERROR
    assert "form" in finished.error
    submit(core, 1, prompt, max_tokens=1)
    ((_, num_computed, _),) = new(schedule(core))
    assert num_computed == 8, "its KV is as good as any"


def test_a_request_that_reads_no_prefix_cache_computes_its_whole_prompt():
    core = make_core()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    submit(core, 0, prompt, max_tokens=1)
    answer(core, schedule(core), 0)
    schedule(core)
    submit(core, 1, prompt, max_tokens=1, reads_prefix_cache=False)
    ((row, num_computed, _),) = new(plan := schedule(core))
    assert (num_computed, chunks(plan)[row]) == (0, 9)


def test_a_traced_request_has_events_in_plans():
    core = make_core()
    submit(core, 0, range(9), max_tokens=1)
    first = schedule(core)
    assert first.trace_events == ()
    answer(core, first, 0)
    submit(core, 1, range(9), traceparent="t")
    plan = schedule(core)
    assert plan.trace_events == (Started(ROUTER, 1, 8, 0),)
    answer(core, plan, 0)
    (seq,) = core.running
    core.preemption.preempt(seq)
    plan = schedule(core)
    assert plan.trace_events == (Preempted(ROUTER, 1, 9, 0), Started(ROUTER, 1, 8, 0))


def test_an_observer_learns_of_each_preemption_before_and_after_it():
    core = make_core()
    submit(core, 0, [1, 2])
    answer(core, schedule(core), 0)
    (seq,) = core.running
    seen = []

    def observe(seq, can_swap):
        seen.append((seq.seq_key, can_swap, seq.status))
        return lambda: seen.append(seq.status)

    core.preemption.observer = observe
    core.preemption.preempt(seq, can_swap=False)
    assert seen == [(0, False, SeqStatus.DECODE), SeqStatus.WAITING]
