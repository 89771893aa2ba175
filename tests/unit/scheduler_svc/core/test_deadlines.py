"""Examples of deadlines: sequences that end in the queue, and refused ones."""

import numpy as np
import pytest
from policy_driver import ROUTER, Worker, make_core, request

from scheduler_svc.core.interface.errors import DeadlineError
from scheduler_svc.core.interface.request import FinishReason, Request, SeqKey
from scheduler_svc.core.invariants import check
from scheduler_svc.core.limits.acceptance import WorkerRates, check_deadline


def test_a_waiting_sequence_ends_at_its_deadline_without_a_block():
    core = make_core()
    core.submit(request(0, max_tokens=8), 0.0)
    core.submit(request(1, deadline=5.0), 1.0)
    core.submit(request(2, deadline=5.5), 2.0)
    worker = Worker(core, now=4.9)
    worker.step()
    assert worker.ends == {}
    worker.now = 5.0
    worker.step()
    assert worker.ends == {1: FinishReason.DEADLINE}
    assert (worker.admitted, core.load().num_waiting) == ([0], 1)
    worker.now = 6.0
    worker.run()
    assert worker.admitted == [0]
    assert worker.ends[2] is FinishReason.DEADLINE


def test_siblings_of_an_expired_sequence_expire_with_it():
    core = make_core()
    prompt = np.array([1, 2, 3], np.int32)
    core.submit(Request(ROUTER, SeqKey(0), "r", prompt, 3, 5, b"", deadline=1.0), 0.0)
    assert core.schedule(1.0) is None
    assert [end.seq_key for end in core.take_expired()] == [0, 1, 2]
    assert core.take_expired() == ()
    check(core)


def test_running_sequences_do_not_expire():
    core = make_core()
    core.submit(request(0, max_tokens=4, deadline=1.0), 0.0)
    worker = Worker(core, now=0.5)
    worker.step()
    worker.now = 2.0
    worker.run()
    assert worker.ends == {0: FinishReason.LENGTH}


RATES = WorkerRates(prefill_tokens_per_s=1000.0, step_s=0.02)


@pytest.mark.parametrize(
    ("num_tokens", "min_tokens", "left_s", "problem"),
    [
        (100, 0, 0.13, None),  # 0.1 s + one step
        (100, 0, 0.11, r"100 prompt tokens at 1000 tokens/s and 1 steps of 0.0200 s take 0.120 s"),
        (100, 10, 0.31, None),
        (100, 10, 0.29, r"deadline is in 0.290 s .* 10 steps .* take 0.300 s"),
        (1, 0, -0.25, "passed 0.250 s ago"),
        (1, 0, 0.0, "passed 0.000 s ago"),
    ],
)
def test_a_deadline_that_cannot_be_met_is_refused(num_tokens, min_tokens, left_s, problem):
    core = make_core()
    item = request(
        1, num_tokens=num_tokens, max_tokens=20, min_tokens=min_tokens, deadline=50 + left_s
    )
    if problem is None:
        core.check_deadline(item, 50.0, RATES)
    else:
        with pytest.raises(DeadlineError, match=problem):
            core.check_deadline(item, 50.0, RATES)


def test_a_deadline_that_can_just_be_met_is_accepted():
    rates = WorkerRates(prefill_tokens_per_s=64.0, step_s=0.25)
    make_core().check_deadline(request(1, num_tokens=32, deadline=0.75), 0.0, rates)


def test_nothing_is_refused_for_rates_that_are_not_known():
    item = request(1, num_tokens=100, deadline=0.001)
    for rates in (WorkerRates(), WorkerRates(step_s=1.0), WorkerRates(prefill_tokens_per_s=1.0)):
        make_core().check_deadline(item, 0.0, rates)


def test_a_request_without_a_deadline_may_take_any_time():
    make_core().check_deadline(request(1, num_tokens=100, max_tokens=20), 0.0, RATES)


def test_cached_tokens_are_not_counted_for_a_deadline_that_is_met_without_any():
    check_deadline(request(1, deadline=1.0), 0.0, RATES, make_core().config, pytest.fail)


def test_cached_tokens_take_no_time():
    core = make_core()
    item = request(1, num_tokens=101, deadline=0.05)
    with pytest.raises(DeadlineError, match="101 prompt tokens"):
        core.check_deadline(item, 0.0, RATES)
    core.submit(request(1, num_tokens=100), 0.0)
    Worker(core).run()
    core.check_deadline(item, 0.0, RATES)
