"""The sequences that continue, and in which blocks, when a scheduler core is replaced."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from takeover_driver import (
    MAX_TOKENS,
    Pair,
    assert_all_received,
    lengths,
    long_request,
    make_request,
    num_outputs,
    prompt_charges,
)

from contract.info import MemoryLevel
from contract.state import Holdings
from contract.worker_limits import STATE_WINDOW
from scheduler_svc.core.handover.takeover import REUNION_S
from scheduler_svc.core.interface.events import Admitted, Finished
from scheduler_svc.core.interface.identity import identity
from scheduler_svc.core.interface.request import FinishReason
from scheduler_svc.core.invariants import check
from scheduler_svc.core.scheduler import Scheduler
from tests.property.oracle import expected_output
from tests.property.worker import log_of


@pytest.mark.parametrize("kv_windows", [(None,), (None, 8), (STATE_WINDOW,)])
def test_a_sequence_runs_on_where_it_was_and_computes_nothing_again(kv_windows):
    pair, request = Pair(kv_windows=kv_windows), long_request()
    pair.submit(request)
    pair.step(6)
    num_computed = pair.worker.num_computed_tokens
    pair.replace_core()
    assert pair.core.takeover.num_held_tokens(pair.again(request)) == 16 + 5
    pair.submit(pair.again(request))
    assert not pair.core.takeover.unclaimed
    assert pair.core.load().num_adopted_tokens == 16 + 5
    pair.run()
    assert_all_received(pair, request)
    num_left = num_outputs(request) - 6
    assert pair.worker.num_computed_tokens - num_computed == num_left
    assert pair.core.load().num_recomputed_tokens == 0


def test_tokens_that_no_router_received_are_sent_and_not_drawn_again(monkeypatch):
    monkeypatch.setattr("tests.property.worker.crc32", lambda _: 1)  # no log-probabilities
    pair, request = Pair(), long_request()
    pair.submit(request)
    pair.step(4)
    pair.step(2, is_received=False)
    num_computed = pair.worker.num_computed_tokens
    assert len(pair.received[0]) == 4
    pair.replace_core()
    pair.submit(pair.again(request))
    assert len(pair.received[0]) == 6
    pair.run()
    assert_all_received(pair, request)
    assert pair.worker.num_computed_tokens - num_computed == num_outputs(request) - 6


def test_tokens_whose_log_probabilities_are_lost_are_drawn_again(monkeypatch):
    monkeypatch.setattr("tests.property.worker.crc32", lambda _: 0)
    pair, request = Pair(), long_request()
    pair.submit(request)
    pair.step(4)
    pair.step(2, is_received=False)
    pair.replace_core()
    pair.submit(pair.again(request))
    assert len(pair.received[0]) == 4
    pair.run()
    assert_all_received(pair, request)
    assert pair.core.load().num_recomputed_tokens == 2


@pytest.mark.parametrize(("kv_windows", "num_lost"), [((None, 8), 9), ((STATE_WINDOW,), 2)])
def test_a_row_whose_kv_is_of_no_use_for_the_known_tokens_is_freed(
    monkeypatch, kv_windows, num_lost
):
    """The blocks behind its window were given back, or its state is ahead."""
    monkeypatch.setattr("tests.property.worker.crc32", lambda _: 0)
    pair, request = Pair(kv_windows=kv_windows), long_request(least=17)
    pair.submit(request)
    pair.step(16)
    del pair.received[0][-num_lost:]
    pair.replace_core()
    pair.submit(pair.again(request))
    assert not pair.core.takeover.unclaimed
    assert pair.core.load().num_running == 0
    pair.run()
    assert_all_received(pair, request)


def test_a_router_that_has_all_tokens_gets_no_log_probabilities(monkeypatch):
    monkeypatch.setattr("tests.property.worker.crc32", lambda _: 4 * 2)
    pair, request = Pair(), long_request()
    pair.submit(request)
    pair.step(4)
    pair.replace_core()
    pair.core.submit(pair.again(request), 0.0)
    assert pair.core.load().num_running == 1
    assert pair.core.takeover.take_adopted() is None


def test_a_router_that_asked_for_no_log_probabilities_gets_none(monkeypatch):
    monkeypatch.setattr("tests.property.worker.crc32", lambda _: 4 * 2 + 1)
    pair, request = Pair(), long_request()
    pair.submit(request)
    pair.step(2, is_received=False)
    pair.replace_core()
    pair.core.submit(request, 0.0)
    events = pair.core.takeover.take_adopted()
    assert (len(events.token_ids), events.logprobs) == (2, ())


@pytest.mark.parametrize("has_heard", [False, True])
def test_a_prompt_is_computed_again_for_a_router_that_waits_for_its_scores(monkeypatch, has_heard):
    monkeypatch.setattr("tests.property.worker.crc32", lambda _: 1)
    pair, request = Pair(), replace(long_request(), reads_prefix_cache=False)
    pair.submit(request)
    pair.step(2, is_received=has_heard)
    num_computed = pair.worker.num_computed_tokens
    pair.replace_core()
    pair.submit(pair.again(request))
    assert bool(pair.received) == has_heard
    assert not pair.core.takeover.unclaimed
    pair.run()
    assert_all_received(pair, request)
    num_left = num_outputs(request) - 2 if has_heard else 16 + num_outputs(request) - 1
    assert pair.worker.num_computed_tokens - num_computed == num_left


@pytest.mark.parametrize("num_kept", [2, 3])
def test_tokens_are_reported_with_kept_log_probabilities(monkeypatch, num_kept):
    monkeypatch.setattr("tests.property.worker.crc32", lambda _: 4 * num_kept)
    pair, request = Pair(), long_request()
    pair.submit(request)
    pair.step(4)
    pair.step(2, is_received=False)
    num_computed = pair.worker.num_computed_tokens
    pair.replace_core()
    pair.core.submit(pair.again(request), 0.0)
    events = pair.core.takeover.take_adopted()
    assert len(events.token_ids) == 2
    assert events.logprobs == tuple((i, log_of(16 + 4 + i)) for i in range(2))
    assert events.result_index.tolist() == [0, 1]
    pair._receive(events)
    pair.run()
    assert_all_received(pair, request)
    assert pair.worker.num_computed_tokens - num_computed == num_outputs(request) - 6


def test_log_probabilities_of_one_request_follow_tokens_of_another_without(monkeypatch):
    pair, requests = Pair(), [long_request(key) for key in range(2)]
    scored = identity(requests[1], 0)
    monkeypatch.setattr("tests.property.worker.crc32", lambda it: 4 * 2 if it == scored else 1)
    for request in requests:
        pair.submit(request)
    pair.step(4)
    pair.step(2, is_received=False)
    pair.replace_core()
    for request in requests:
        pair.core.submit(pair.again(request), 0.0)
    events = pair.core.takeover.take_adopted()
    assert events.seq_keys.tolist() == [0, 0, 1, 1]
    assert events.logprobs == tuple((2 + i, log_of(16 + 4 + i)) for i in range(2))


@pytest.mark.parametrize(
    ("num_expected", "max_tokens", "reason", "stop_token_id"),
    [(3, MAX_TOKENS, FinishReason.STOP, 1), (30, 3, FinishReason.LENGTH, None)],
)
def test_a_sequence_that_ended_unheard_ends(
    monkeypatch, num_expected, max_tokens, reason, stop_token_id
):
    monkeypatch.setattr("tests.property.worker.crc32", lambda _: 1)
    prompts = (p for p in product((0, 1), repeat=9) if lengths(p) == [num_expected])
    prompt = next(p for p in prompts if expected_output("", 0, p, 3)[1] == 0)
    pair, request = Pair(), make_request(prompt=prompt, max_tokens=max_tokens)
    pair.submit(request)
    pair.step(2)
    pair.step(1, is_received=False)
    pair.replace_core()
    pair.submit(pair.again(request))
    assert pair.received[0] == expected_output("", 0, prompt, 3)
    assert pair.ends == [Finished(request.source, 0, reason, stop_token_id)]
    load = pair.core.load()
    assert load.num_free_blocks + load.num_cached_blocks == load.num_blocks


@pytest.mark.parametrize("kv_windows", [(None,), (None, 8)])
def test_an_output_forks_from_one_that_is_far_ahead(monkeypatch, kv_windows):
    monkeypatch.setattr("tests.property.worker.crc32", lambda _: 1)  # no log-probabilities
    pair, request = Pair(kv_windows=kv_windows), long_request(n=2)
    pair.core.set_memory_level(MemoryLevel.CRITICAL)  # so the second output waits
    pair.submit(request)
    pair.step(9)
    pair.received.clear()
    pair.replace_core()
    pair.submit(request)
    pair.run()
    assert_all_received(pair, request)


def test_outputs_that_share_their_prompt_share_it_still():
    pair, request = Pair(), long_request(n=3)
    pair.submit(request)
    pair.step(6)
    num_free = pair.core.load().num_free_blocks + pair.core.load().num_cached_blocks
    num_computed = pair.worker.num_computed_tokens
    pair.replace_core()
    pair.submit(pair.again(request))
    load = pair.core.load()
    assert load.num_free_blocks + load.num_cached_blocks >= num_free - 3
    pair.run()
    assert_all_received(pair, request)
    # other outputs of the request start a step later
    num_had = sum(6 - (index > 0) for index in range(3))
    assert pair.worker.num_computed_tokens - num_computed == num_outputs(request) - num_had


@pytest.mark.parametrize("n", [2, 3])
def test_outputs_of_which_nothing_was_heard_are_adopted_each(n):
    pair, request = Pair(max_num_seqs=2), long_request(n=n)
    pair.submit(request)
    pair.step(4, is_received=False)
    pair.replace_core()
    assert len(pair.core.takeover.unclaimed) == 2
    pair.submit(request)
    assert not pair.core.takeover.unclaimed
    pair.run()
    assert_all_received(pair, request)


def test_a_prompt_that_was_half_computed_goes_on_from_there():
    pair = Pair(max_num_batched_tokens=8)
    request = long_request()
    pair.submit(request)
    pair.step(1)
    pair.replace_core()
    pair.submit(request)
    pair.run()
    assert_all_received(pair, request)
    num_prompt = len(request.prompt_token_ids)
    assert pair.worker.num_computed_tokens == num_prompt + num_outputs(request) - 1


def test_blocks_that_are_filled_later_can_be_found():
    prompt = next(p for p in product((0, 1), repeat=3) if lengths(p)[0] >= 8)
    pair, request = Pair(), make_request(prompt=prompt)
    pair.submit(request)
    pair.step(1)
    pair.replace_core()
    pair.submit(pair.again(request))
    pair.run()
    pair.submit(make_request(1, [*prompt, *pair.received[0][:6]], max_tokens=1))
    pair.run()
    assert pair.core.load().prefix_cache_hits == 8


@pytest.mark.parametrize(
    ("changes", "fields", "num_steps"),
    [
        ({}, {}, 2),
        ({}, {"max_tokens": 2}, 2),
        ({"max_num_batched_tokens": 8}, {}, 1),
    ],
)
def test_what_had_begun_has_not_waited(monkeypatch, changes, fields, num_steps):
    monkeypatch.setattr("tests.property.worker.crc32", lambda _: 1)
    pair, request = Pair(**changes), replace(long_request(), **fields)
    pair.submit(request)
    pair.step(num_steps, is_received=False)
    pair.replace_core()
    pair.submit(request, now=100.0)
    pair.run(now=101.0)
    assert pair.admitted == [Admitted(request.source, 0, num_cached_tokens=0, queue_s=0.0)]


def test_no_more_rows_are_kept_than_sequences_may_run():
    pair, requests = Pair(), [long_request(key) for key in range(2)]
    for request in requests:
        pair.submit(request)
    pair.step(4)
    pair.replace_core(max_num_seqs=1)
    assert len(pair.core.takeover.unclaimed) == 1
    for request in requests:
        pair.submit(pair.again(request))
    pair.run()
    for request in requests:
        assert_all_received(pair, request)


def test_a_state_may_be_ahead_of_a_sequence_that_has_stopped():
    pair, request = Pair(kv_windows=(STATE_WINDOW,)), long_request()
    pair.submit(request)
    pair.step(6)
    held = pair.worker.hand_over()
    pair.core = Scheduler(pair.config)
    rows = tuple(replace(row, has_stopped=True) for row in held.rows)
    pair.core.inherit(replace(held, rows=rows), 0.0)
    pair.submit(pair.again(request))
    assert (pair.core.load().num_running, pair.core.takeover.unclaimed) == (0, [])


def test_nothing_is_copied_for_a_sequence_that_begins_a_block(monkeypatch):
    monkeypatch.setattr("tests.property.worker.crc32", lambda _: 0)
    pair, request = Pair(), long_request(least=12)
    pair.submit(request)
    pair.step(11)
    del pair.received[0][5:]
    pair.replace_core()
    pair.submit(pair.again(request))
    assert not pair.core.schedule(0.0).copy_src_block_ids.size


def test_a_row_that_is_behind_its_router_goes_on():
    """Its sequence ran at another worker meanwhile."""
    pair, request = Pair(), long_request()
    pair.submit(request)
    pair.step(6)
    held = pair.worker.hand_over()
    (row,) = held.rows
    num_computed = row.num_computed_tokens - 3
    old = replace(row, token_ids=row.token_ids[:-3], num_computed_tokens=num_computed)
    pair.core = Scheduler(pair.config)
    pair.core.inherit(replace(held, rows=(old,)), 0.0)
    pair.submit(pair.again(request))
    assert pair.core.load().num_adopted_tokens == num_computed
    pair.run()
    assert_all_received(pair, request)


@pytest.mark.parametrize(("max_num_batched_tokens", "num_left"), [(64, 0), (8, 8)])
def test_a_prompt_is_charged_once(max_num_batched_tokens, num_left):
    limits = {"max_num_batched_tokens": max_num_batched_tokens, "enable_prefix_caching": False}
    pair, request = Pair(policy="fair", **limits), long_request()
    pair.submit(request)
    pair.step(1)
    pair.replace_core()
    pair.submit(pair.again(request))
    charged = prompt_charges(pair)
    pair.core.preemption.preempt(*pair.core.running, can_swap=False)
    pair.run()
    assert_all_received(pair, request)
    assert sum(charged) == num_left


def test_without_a_prefix_cache_sequences_run_on_all_the_same():
    pair, request = Pair(enable_prefix_caching=False), long_request()
    pair.submit(request)
    pair.step(6)
    num_computed = pair.worker.num_computed_tokens
    pair.replace_core()
    pair.submit(pair.again(request))
    pair.run()
    assert_all_received(pair, request)
    assert pair.worker.num_computed_tokens - num_computed == num_outputs(request) - 6


def test_unclaimed_blocks_are_freed_after_a_time_and_stay_cached():
    pair, request = Pair(), long_request()
    pair.submit(request)
    pair.step(6)
    pair.replace_core(now=100.0)
    load = pair.core.load()
    assert load.num_free_blocks + load.num_cached_blocks < load.num_blocks
    assert pair.core.schedule(109.0) is None
    assert len(pair.core.takeover.unclaimed) == 1
    assert pair.core.schedule(110.0) is None
    check(pair.core)
    load = pair.core.load()
    assert load.num_free_blocks + load.num_cached_blocks == load.num_blocks
    assert load.num_cached_blocks > 0


def test_unclaimed_blocks_give_way_to_a_sequence_that_could_not_run_otherwise():
    pair, request = Pair(num_blocks=12), long_request()
    pair.submit(request)
    pair.step(6)
    pair.replace_core()
    other = make_request(1, [1] * 33, max_tokens=1)
    pair.submit(other)
    pair.step(now=0.9 * REUNION_S)
    assert pair.core.takeover.unclaimed, "its request may be on its way"
    pair.step(now=REUNION_S)
    assert not pair.core.takeover.unclaimed
    assert 1 in pair.received


def test_requests_of_one_name_run_on_each_with_its_own_tokens():
    prompts = [p for p in product((0, 1), repeat=5) if lengths(p)[0] > 3]
    requests = [make_request(key, prompts[key], request_id="one name") for key in range(2)]
    pair = Pair()
    for request in requests:
        pair.submit(request)
    pair.step(3)
    num_computed = pair.worker.num_computed_tokens
    pair.replace_core()
    for request in requests:
        pair.submit(pair.again(request))
    assert not pair.core.takeover.unclaimed
    assert not pair.core.takeover.give_up_one(REUNION_S)
    pair.run()
    for request in requests:
        assert_all_received(pair, request)
    num_left = sum(num_outputs(request) - 3 for request in requests)
    assert pair.worker.num_computed_tokens - num_computed == num_left


def test_another_request_of_that_name_does_not_get_its_tokens():
    pair, request = Pair(), long_request()
    pair.submit(request)
    pair.step(6)
    pair.replace_core()
    others = (
        replace(request, sampling=b"other"),
        replace(request, cache_salt="other"),
        replace(request, tenant="other"),
        replace(request, request_id="other"),
        replace(request, max_tokens=MAX_TOKENS + 1),
        replace(request, prompt_token_ids=1 - request.prompt_token_ids),
    )
    assert pair.core.takeover.num_held_tokens(request)
    assert not any(map(pair.core.takeover.num_held_tokens, others))
    assert identity(request, 0) != identity(request, 1)


def test_a_scheduler_of_another_version_computes_the_same_identity():
    request = make_request(1, [0, 1], tenant="t", cache_salt="s")
    assert identity(request, 1).hex().startswith("3fa459c21e155c4c")


@pytest.mark.parametrize("kv_windows", [(None,), (None, 8)])
def test_a_block_that_two_rows_claim_to_write_is_copied(kv_windows):
    """Either the worker's report is wrong, or another sequence found the block by its hash."""
    pair, request = Pair(kv_windows=kv_windows), long_request()
    pair.submit(request)
    pair.step(6)
    held = pair.worker.hand_over()
    (row,) = held.rows
    lie = replace(row, identity=b"x" * 32)
    pair.core = Scheduler(pair.config)
    pair.core.inherit(Holdings((row, lie), held.device), 0.0)
    pair.submit(pair.again(request))
    plan = pair.core.schedule(0.0)
    assert plan.copy_src_block_ids.tolist() == [*row.block_ids[-len(kv_windows) :]]
    check(pair.core)


def test_a_row_with_more_tokens_than_its_request_may_have_is_not_believed():
    pair, request = Pair(), long_request()
    pair.submit(request)
    pair.step(6)
    held = pair.worker.hand_over()
    (row,) = held.rows
    lie = replace(row, token_ids=np.append(row.token_ids, np.zeros(MAX_TOKENS, np.int32)))
    pair.core = Scheduler(pair.config)
    pair.core.inherit(Holdings((lie,), held.device), 0.0)
    pair.submit(pair.again(request))
    pair.run()
    assert_all_received(pair, request)
