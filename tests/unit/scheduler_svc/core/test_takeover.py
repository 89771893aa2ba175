"""The sequences that continue, and in which blocks, when a scheduler core is replaced."""

from dataclasses import replace

import numpy as np
import pytest
from takeover_driver import (
    MAX_TOKENS,
    PROMPT,
    Pair,
    assert_all_received,
    long_request,
    make_request,
    num_outputs,
)

from contract.state import Holdings
from scheduler_svc.core.handover.takeover import REUNION_S
from scheduler_svc.core.interface.identity import identity
from scheduler_svc.core.interface.request import FinishReason
from scheduler_svc.core.invariants import check
from scheduler_svc.core.scheduler import Scheduler
from tests.property.oracle import expected_output
from tests.property.worker import log_of


def test_a_sequence_runs_on_where_it_was_and_computes_nothing_again():
    pair, request = Pair(), long_request()
    pair.submit(request)
    pair.step(6)
    num_computed = pair.worker.num_computed_tokens
    pair.replace_core()
    assert pair.core.takeover.num_held_tokens(pair.again(request)) == 16 + 5
    pair.submit(pair.again(request))
    assert not pair.core.takeover.unclaimed
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


def test_a_sequence_that_stopped_unheard_ends(monkeypatch):
    monkeypatch.setattr("tests.property.worker.crc32", lambda _: 1)
    prompts = ([*PROMPT, *map(int, f"{tail:06b}")] for tail in range(64))
    prompt = next(p for p in prompts if len(expected_output("", 0, p, MAX_TOKENS)) == 3)
    pair, request = Pair(), make_request(prompt=prompt)
    pair.submit(request)
    pair.step(2)
    pair.step(1, is_received=False)
    pair.replace_core()
    pair.submit(pair.again(request))
    assert_all_received(pair, request)
    assert pair.reasons == {0: FinishReason.STOP}
    load = pair.core.load()
    assert load.num_free_blocks + load.num_cached_blocks == load.num_blocks


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


def test_outputs_of_which_nothing_was_heard_are_adopted_each():
    pair, request = Pair(), long_request(n=2)
    pair.submit(request)
    pair.step(3, is_received=False)
    pair.step(1, is_received=False)
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


def test_a_block_that_two_rows_claim_to_write_is_copied():
    """Either the worker's report is wrong, or another sequence found the block by its hash."""
    pair, request = Pair(), long_request()
    pair.submit(request)
    pair.step(6)
    held = pair.worker.hand_over()
    (row,) = held.rows
    lie = replace(row, identity=b"x" * 32)
    pair.core = Scheduler(pair.config)
    pair.core.inherit(Holdings((row, lie), held.device), 0.0)
    pair.submit(pair.again(request))
    plan = pair.core.schedule(0.0)
    assert plan.copy_src_block_ids.tolist() == [row.block_ids[-1]]
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
