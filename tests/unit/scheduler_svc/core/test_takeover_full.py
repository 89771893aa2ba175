"""A scheduler core is replaced while the device is full and some KV is on the host."""

from collections import deque
from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest
from takeover_driver import Pair, assert_all_received, lengths, make_request

from scheduler_svc.core.handover.takeover import REUNION_S
from scheduler_svc.core.interface.config import PreemptionMode
from scheduler_svc.core.interface.request import OutputSoFar
from scheduler_svc.core.scheduler import Scheduler

CRAMPED = {"num_blocks": 20, "num_host_blocks": 64, "max_swap_blocks": 4}


def long_requests(count):
    """Requests with one or two outputs of at least 20 tokens each."""
    dice, requests = Random(1), []
    while len(requests) < count:
        key, n = 10 * len(requests), 1 + len(requests) % 2
        prompt = [dice.randint(0, 1) for _ in range(10 + len(requests))]
        if min(lengths(prompt, n)) >= 20:
            requests.append(make_request(key, prompt, n))
    return requests


REQUESTS = long_requests(5)


@pytest.fixture(autouse=True)
def _no_log_probabilities(monkeypatch):
    """Some tokens' log-probabilities would be lost, and those tokens drawn again."""
    monkeypatch.setattr("tests.property.worker.crc32", lambda _: 1)


def run_two_ahead(pair, num_results, *, num_not_received=0):
    """Run like the engine, with two steps in flight at the end."""
    outcomes, events = deque(), []
    for _ in range(num_results):
        while len(outcomes) < 2 and (plan := pair.core.schedule(0.0)) is not None:
            outcomes.append(pair.worker.execute(plan))
        events.append(pair.core.update(outcomes.popleft()))
    while len(outcomes) < 2 and (plan := pair.core.schedule(0.0)) is not None:
        outcomes.append(pair.worker.execute(plan))
    for each in events[: len(events) - num_not_received]:
        pair._receive(each)


def submit_again(pair, requests, *, num_steps_between):
    for request in requests:
        keys = range(request.first_seq_key, request.first_seq_key + request.n)
        outputs = tuple(
            OutputSoFar(
                np.array(pair.received.get(key, []), np.int32), finished=key in pair.reasons
            )
            for key in keys
        )
        if all(output.finished for output in outputs):
            continue
        has_begun = any(len(output.token_ids) for output in outputs)
        pair.submit(replace(request, outputs=outputs if has_begun else ()))
        pair.step(num_steps_between)


def run_to_the_end(pair):
    """Run to the end. Sequences that had ended but still have a row keep blocks until
    `REUNION_S`."""
    pair.step(100)
    pair.run(now=REUNION_S)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("num_steps_between", [0, 1])
def test_nothing_is_computed_again_whenever_it_happens(num_steps_between, order):
    """Running and swapped sequences continue, even one that needs a block when none is free. The
    first sequence that returns takes no blocks from those that return later.
    """
    num_swapped = 0
    for num_results in range(1, 56, 3):
        pair = Pair(**CRAMPED)
        for request in REQUESTS:
            pair.submit(request)
        run_two_ahead(pair, num_results)
        num_swapped += pair.core.load().num_swapped
        pair.replace_core()
        submit_again(pair, REQUESTS[::order], num_steps_between=num_steps_between)
        run_to_the_end(pair)
        for request in REQUESTS:
            assert_all_received(pair, request)
        assert pair.core.load().num_recomputed_tokens == 0, f"after {num_results} results"
    assert num_swapped > 20


@pytest.mark.parametrize(
    ("changes", "computes_again"),
    [
        ({"num_blocks": 20, "num_host_blocks": 0}, True),
        ({"num_blocks": 20, "num_host_blocks": 2}, True),
        (CRAMPED | {"preemption_mode": PreemptionMode.RECOMPUTE}, True),
        ({"num_blocks": 200, "num_host_blocks": 0}, False),
    ],
)
def test_a_sequence_that_needs_a_block_without_host_room_is_recomputed(changes, computes_again):
    """Its tokens stay the same. A sequence that finds a free block is not recomputed."""
    num_recomputed = 0
    for num_results in range(1, 56 if computes_again else 19, 3):  # otherwise they have ended
        pair = Pair(**changes)
        for request in REQUESTS:
            pair.submit(request)
        run_two_ahead(pair, num_results)
        pair.replace_core()
        submit_again(pair, REQUESTS, num_steps_between=0)
        run_to_the_end(pair)
        for request in REQUESTS:
            assert_all_received(pair, request)
        num_recomputed += pair.core.load().num_recomputed_tokens
    assert (num_recomputed > 0) == computes_again


def test_a_swapped_sequence_one_token_ahead_of_its_router_is_found():
    """Even if that token is the first of a block."""
    num_ahead = 0
    for num_results in range(4, 30):
        pair = Pair(**CRAMPED)
        for request in REQUESTS:
            pair.submit(request)
        run_two_ahead(pair, num_results)
        swapped = [seq for seq in pair.core.live if seq.host_block_ids]
        for seq in swapped:
            del pair.received[seq.seq_key][seq.num_computed_tokens - seq.num_prompt_tokens :]
        num_ahead += len(swapped)
        pair.replace_core()
        submit_again(pair, REQUESTS, num_steps_between=0)
        run_to_the_end(pair)
        for request in REQUESTS:
            assert_all_received(pair, request)
        assert pair.core.load().num_recomputed_tokens == 0, f"after {num_results} results"
    assert num_ahead > 20


def test_unclaimed_rows_may_hold_more_blocks_than_a_smaller_pool_has():
    pair = Pair(num_blocks=10, max_num_blocks=10, max_model_len=16)
    for key in range(2):
        pair.submit(make_request(key, prompt=[key] * 10, max_tokens=6))
    pair.step(2)
    pair.replace_core()
    pair.core.shrink(5)
    pair.step()
    assert pair.core.takeover.unclaimed
    pair.step(now=10.0)
    assert not pair.core.takeover.unclaimed
    assert pair.core.pool.num_available == 5


def test_less_than_a_block_is_computed_again_of_what_was_swapped_out_far_ahead_of_its_source():
    pair = Pair(**CRAMPED)
    for request in REQUESTS:
        pair.submit(request)
    run_two_ahead(pair, 20)
    swapped = [seq for seq in pair.core.live if seq.host_block_ids]
    for seq in swapped:
        del pair.received[seq.seq_key][-3:]
    pair.replace_core()
    submit_again(pair, REQUESTS, num_steps_between=0)
    run_to_the_end(pair)
    for request in REQUESTS:
        assert_all_received(pair, request)
    num_recomputed = pair.core.load().num_recomputed_tokens
    assert 0 < num_recomputed < pair.config.block_size * len(swapped)


def fill(pair):
    """A sequence of 16 computed tokens in 4 blocks, which needs a fifth; another has 8 blocks.

    The router has received nothing. Returns the first sequence's request.
    """
    prompt = next(p for p in product((0, 1), repeat=16) if lengths(p)[0] >= 5)
    request, other = make_request(0, prompt), make_request(1, (1, 0) * 15, max_tokens=16)
    for each in (request, other):
        pair.submit(each)
    pair.step(is_received=False)
    return request


@pytest.mark.parametrize(
    ("num_blocks", "num_host_blocks", "state"), [(13, 4, "runs"), (12, 4, "swapped"), (12, 3, "")]
)
def test_a_sequence_takes_the_last_blocks(num_blocks, num_host_blocks, state):
    pair = Pair(num_blocks=num_blocks, num_host_blocks=num_host_blocks)
    request = fill(pair)
    pair.replace_core()
    pair.submit(request)
    load = pair.core.load()
    assert (load.num_running, load.num_swapped) == (state == "runs", state == "swapped")
    run_to_the_end(pair)
    assert_all_received(pair, request)


def test_what_is_computed_again_for_lack_of_room_is_counted():
    pair = Pair(num_blocks=12, enable_prefix_caching=False)
    request = fill(pair)
    pair.replace_core()
    pair.submit(request)
    run_to_the_end(pair)
    assert_all_received(pair, request)
    assert pair.core.load().num_recomputed_tokens == 16


def test_a_sequence_without_kv_waits_without_host_blocks():
    pair = Pair(num_blocks=12, num_host_blocks=4)
    request = fill(pair)
    held = pair.worker.hand_over()
    nothing = np.empty(0, np.int32)
    first, other = held.rows
    pair.core = Scheduler(pair.config)
    bare = replace(first, num_computed_tokens=0, block_ids=nothing)
    pair.core.inherit(replace(held, rows=(bare, other)), 0.0)
    pair.submit(request)
    assert (pair.core.load().num_waiting, pair.core.load().num_swapped) == (1, 0)
    run_to_the_end(pair)
    assert_all_received(pair, request)
