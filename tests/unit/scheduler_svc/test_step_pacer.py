"""How much of a long prompt a step may compute, and when it is late, from the steps before it."""

import numpy as np
import pytest

from scheduler_svc.core.plan import StepId, StepPlan
from scheduler_svc.step_pacer import StepPacer

NOTHING = np.array([], np.int32)


def plan_of(num_prompt_tokens, num_decodes):
    return StepPlan(
        StepId(1),
        *(NOTHING, (), NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING),
        num_decodes,
        num_decodes + num_prompt_tokens,
    )


def pace(*steps, max_slowdown=1.5) -> int | None:
    """Of steps (prompt tokens, decodes, seconds)."""
    pacer = StepPacer(max_slowdown)
    for num_prompt_tokens, num_decodes, execute_s in steps:
        pacer.sent(plan_of(num_prompt_tokens, num_decodes))
        pacer.answered(execute_s)
    return pacer.max_paced_tokens


def test_there_is_no_bound_before_both_kinds_of_step_are_known():
    assert pace() is None
    assert pace((0, 8, 0.1)) is None
    assert pace((100, 0, 0.1)) is None


def test_tokens_fill_what_a_step_may_take_longer():
    # A token takes 1 ms, a decode 100 ms: half as long again is 50 tokens.
    assert pace((100, 0, 0.1), (0, 8, 0.1)) == 50
    assert pace((100, 0, 0.1), (0, 8, 0.1), max_slowdown=3.0) == 200


def test_what_tokens_add_to_a_decode_counts_and_not_the_decode():
    assert pace((0, 8, 0.1), (40, 8, 0.11)) == 200  # 0.25 ms each


def test_a_step_that_was_faster_than_a_decode_does_not_make_tokens_free():
    assert pace((0, 8, 0.1), (10, 8, 0.05)) == pytest.approx(200, abs=1)  # a 20th of it for ten


def test_recent_steps_weigh_more():
    slow, fast = [(0, 8, 0.2)], [(0, 8, 0.1)] * 30
    assert pace((100, 0, 0.1), *slow, *fast) == pytest.approx(50, abs=1)


def test_a_long_prompt_always_goes_on():
    assert pace((10, 0, 1.0), (0, 8, 0.001)) == 16


def test_no_bound_if_none_is_wanted():
    assert pace((100, 0, 0.1), (0, 8, 0.1), max_slowdown=float("inf")) is None


def late_after_s(*steps, in_flight):
    """After steps (prompt tokens, decodes, seconds), with others (prompt tokens, decodes) going."""
    pacer = StepPacer(1.5)
    for num_prompt_tokens, num_decodes, execute_s in steps:
        pacer.sent(plan_of(num_prompt_tokens, num_decodes))
        pacer.answered(execute_s)
    for num_prompt_tokens, num_decodes in in_flight:
        pacer.sent(plan_of(num_prompt_tokens, num_decodes))
    return pacer.is_late_after_s


def test_steps_are_late_after_ten_times_what_they_take():
    known = [(0, 8, 0.1), (100, 0, 1.0)]
    assert late_after_s(*known, in_flight=[(400, 0), (100, 8)]) == pytest.approx(51)
    assert late_after_s(*known, in_flight=[(0, 8)]) == 1.5, "no less: a process may be starved"


def test_nobody_can_say_when_a_step_of_an_unknown_kind_is_late():
    assert late_after_s(in_flight=[(10, 0)]) is None
    assert late_after_s((100, 0, 1.0), in_flight=[(0, 8)]) is None
    assert late_after_s((0, 8, 1.0), in_flight=[(10, 0)]) is None


def test_a_step_that_computes_nothing_may_wait_as_long_as_it_is_alone():
    known = [(0, 8, 0.1)]
    assert late_after_s(*known, in_flight=[(0, 0)]) is None
    assert late_after_s(*known, in_flight=[(0, 0), (0, 8)]) == 1.5
