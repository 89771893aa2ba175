"""The pacer's bounds on prompt tokens, and late steps, learned from earlier steps."""

import math

import numpy as np
import pytest

from contract.step import Plan, StepId
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.pacing import Pace, PromptQueue, StepPacer

ROOM = {"num_blocks": 1, "block_size": 1, "max_num_seqs": 1, "max_model_len": 1}
CPU = SchedulerConfig(**ROOM, max_num_batched_tokens=2048, num_saturating_tokens=512)
GPU = SchedulerConfig(**ROOM, max_num_batched_tokens=2048, min_prompt_tokens=256)


def plan_of(num_prompt_tokens, num_decodes):
    return Plan(
        StepId(1),
        num_decodes,
        chunk_rows=np.array([0], np.int32),
        chunk_lens=np.array([num_prompt_tokens], np.int32),
    )


def pacer_after(*steps, max_slowdown=1.5, max_step_s=1.5, config=CPU) -> StepPacer:
    """Steps are (prompt tokens, decodes, seconds)."""
    pacer = StepPacer(Pace(max_slowdown, max_step_s), config)
    now_s = 0.0
    for num_prompt_tokens, num_decodes, execute_s in steps:
        pacer.on_sent(plan_of(num_prompt_tokens, num_decodes), now_s)
        now_s += execute_s
        pacer.on_result(execute_s, now_s)
    return pacer


def pace(*steps, max_slowdown=1.5, queue=(8, 0, 0), num_short=1) -> int | None:
    """The bound after steps (prompt tokens, decodes, seconds); a queue is (decodes, tokens,
    short)."""
    prompts = PromptQueue(*queue, num_short)
    return pacer_after(*steps, max_slowdown=max_slowdown).max_paced_tokens(prompts)


def test_there_is_no_bound_before_both_kinds_of_step_are_known():
    assert pace() is None
    assert pace((0, 8, 0.1)) is None
    assert pace((100, 0, 0.1)) is None


def test_tokens_fill_what_a_step_may_take_longer():
    # A token takes 1 ms and a decode 100 ms, so 50 tokens make the step 1.5 times as long.
    assert pace((100, 0, 0.1), (0, 8, 0.1)) == 50
    assert pace((100, 0, 0.1), (0, 8, 0.1), max_slowdown=3.0) == 200


def test_what_tokens_add_to_a_decode_counts_and_not_the_decode():
    assert pace((0, 8, 0.1), (40, 8, 0.11)) == 200  # 0.25 ms each


def test_a_step_that_was_faster_than_a_decode_does_not_make_tokens_free():
    assert pace((0, 8, 0.1), (10, 8, 0.05)) == pytest.approx(200, abs=1)  # a 20th of it for ten


def pace_by(few_s, many_s) -> int | None:
    """The bound beside a decode of 100 ms; 10 tokens beside it, and 110 alone, take these times."""
    return pace((0, 8, 0.1), (10, 8, few_s), (110, 0, many_s))


def test_what_a_step_pays_for_having_any_tokens_is_no_tokens_fault():
    assert pace_by(0.13, 0.13) == pytest.approx(30, abs=1), "1 ms each, and 20 ms for having any"
    assert pace_by(0.105, 0.105) == pytest.approx(55, abs=1), "the first are cheap"


def test_what_having_any_takes_does_not_leave_less_time_than_it_takes_itself():
    assert pace_by(0.14, 0.14) == pytest.approx(30, abs=1), "30 ms for having any, and 30 for them"
    assert pace_by(0.19, 0.19) == pytest.approx(20, abs=1), "80 ms for it, of 100 for both"
    assert pace_by(0.22, 0.22) == 4, "110 ms for it: as few as may be"


def test_many_tokens_are_not_free_because_a_step_was_slow_that_had_few():
    assert pace_by(0.17, 0.11) == pytest.approx(70, abs=1), "half of the ms that they took"


def test_recent_steps_weigh_more():
    slow, fast = [(0, 8, 0.2)], [(0, 8, 0.1)] * 60
    assert pace((100, 0, 0.1), *slow, *fast) == pytest.approx(50, abs=1)


def test_one_step_that_the_machine_held_up_changes_little():
    steps = [(100, 0, 0.1), *[(0, 8, 0.1)] * 20]
    assert pace(*steps, (0, 8, 3.0)) <= 57


def test_a_decode_takes_what_it_took_with_about_as_many_sequences():
    known = [(100, 0, 0.1), (0, 2, 0.04), (0, 30, 0.2)]
    assert pace(*known, queue=(3, 0, 0)) == 20
    assert pace(*known, queue=(25, 0, 0)) == 100
    assert pace(*known, queue=(100, 0, 0)) == 100, "the nearest that is known"


def test_a_prompt_always_goes_on():
    assert pace((10, 0, 1.0), (0, 8, 0.001)) == 4


@pytest.mark.parametrize(
    ("max_slowdown", "num_tokens"), [(1.4, 256), (1.5, 256), (1.2, 128), (11.0, 1000)]
)
def test_a_gpu_always_computes_what_is_almost_free_there(max_slowdown, num_tokens):
    # Few tokens paid the host's cost of a step with prompts, so that each seems to take 1 ms.
    pacer = pacer_after((0, 64, 0.1), (40, 64, 0.14), max_slowdown=max_slowdown, config=GPU)
    assert pacer.max_paced_tokens(PromptQueue(64, 0, 0, 0)) == pytest.approx(num_tokens, abs=1)


def test_prompts_do_not_queue_up_for_the_bound():
    slow = [(100, 0, 1.0), (0, 8, 0.1)]  # five tokens make the step 1.5 times as long
    assert pace(*slow) == 5
    assert pace(*slow, queue=(8, 1200, 1200)) == 1200, "short ones are computed at once"
    assert pace(*slow, queue=(8, 2560, 4)) == 10, "of all: one of 256 parts"


def test_of_a_burst_beside_a_few_decodes_some_go_first_and_the_others_together():
    slow = [(100, 0, 1.0), (0, 1, 0.1)]
    assert pace(*slow, queue=(1, 700, 700), num_short=7) == 200, "3 of 8 with the one"
    assert pace(*slow, queue=(3, 500, 500), num_short=5) == 500, "the rest of it"
    assert pace(*slow, queue=(1, 200, 200), num_short=2) == 200, "two are no burst"
    assert pace(*slow, queue=(0, 800, 800), num_short=8) == 300
    assert pace(*slow, queue=(1, 1500, 1500), num_short=15) == 1500, "soon they will be many"


def test_short_prompts_are_spread_over_steps_beside_many_decodes():
    slow = [(100, 0, 1.0), (0, 16, 0.1)]
    assert pace(*slow, queue=(15, 1200, 1200)) == 1200
    assert pace(*slow, queue=(16, 1200, 1200)) == 75, "over 16 steps"
    assert pace(*slow, queue=(16, 100, 100)) == 64, "an 8th of what keeps the device busy"
    assert pace(*slow, queue=(16, 20, 20)) == 20, "all of them"


def test_no_bound_if_none_is_wanted():
    assert pace((100, 0, 0.1), (0, 8, 0.1), max_slowdown=float("inf")) is None


def bound(*steps, **settings) -> int | None:
    """The bound on any step's prompt tokens, after steps (prompt tokens, decodes, seconds)."""
    return pacer_after(*steps, **settings).max_prompt_tokens


def test_first_prompts_are_as_many_tokens_as_keep_the_device_busy():
    assert bound() == 512
    assert bound((0, 8, 0.1)) == 512, "decodes tell nothing of prompts"
    assert bound(config=GPU) is None


@pytest.mark.parametrize(
    ("token_s", "num_tokens"),
    [
        pytest.param(30e-3, 128, id="8B on a CPU: too few would be in time"),
        pytest.param(5e-3, 300, id="1B on a CPU"),
        pytest.param(0.55e-3, None, id="125M on a CPU: all that a step may have"),
        pytest.param(50e-6, None, id="8B on a GPU"),
    ],
)
@pytest.mark.parametrize(("num_prompt_tokens", "num_decodes"), [(512, 0), (128, 0), (100, 28)])
def test_a_step_has_the_prompts_that_there_is_time_for(
    token_s, num_tokens, num_prompt_tokens, num_decodes
):
    seconds = (num_prompt_tokens + num_decodes) * token_s
    assert bound((num_prompt_tokens, num_decodes, seconds)) == num_tokens


def test_no_bound_for_a_steps_time_if_none_is_wanted():
    assert bound(max_step_s=math.inf) is None
    assert bound((512, 0, 15.0), max_step_s=math.inf) is None


def test_what_many_tokens_take_counts_and_not_what_a_few_pay():
    few = [(8, 0, 0.4)] * 9  # 50 ms each
    assert bound(*few) == 128
    assert bound(*few, (128, 0, 0.64), *few) == 300, "5 ms each"


def test_one_slow_step_does_not_bound_those_after_the_next():
    assert bound((512, 0, 60.0)) == 128, "as the first may be"
    assert bound((512, 0, 60.0), (128, 0, 0.64)) == 300
    assert bound((128, 0, 0.64), (128, 0, 60.0)) == pytest.approx(266, abs=1), "an 8th of twice"


def test_a_machine_that_becomes_slower_is_noticed():
    assert bound((512, 0, 2.56), *[(512, 0, 5.12)] * 40) == pytest.approx(150, abs=2)


def late_after_s(*steps, in_flight):
    """When a step is late, after steps (prompt tokens, decodes, seconds), with others in flight."""
    pacer = pacer_after(*steps)
    for num_prompt_tokens, num_decodes in in_flight:
        pacer.on_sent(plan_of(num_prompt_tokens, num_decodes), 0.0)
    return pacer.is_late_after_s


def test_steps_are_late_after_ten_times_what_they_take():
    known = [(0, 8, 0.1), (100, 0, 1.0)]
    assert late_after_s(*known, in_flight=[(400, 0), (100, 8)]) == pytest.approx(51)
    assert late_after_s(*known, in_flight=[(0, 8)]) == 1.5, "no less: a process may be starved"


def test_a_step_of_an_unknown_kind_is_never_late():
    assert late_after_s(in_flight=[(10, 0)]) is None
    assert late_after_s((100, 0, 1.0), in_flight=[(0, 8)]) is None
    assert late_after_s((0, 8, 1.0), in_flight=[(10, 0)]) is None


def test_a_step_that_computes_nothing_may_wait_as_long_as_it_is_alone():
    known = [(0, 8, 0.1)]
    assert late_after_s(*known, in_flight=[(0, 0)]) is None
    assert late_after_s(*known, in_flight=[(0, 0), (0, 8)]) == 1.5


def next_due_s(*steps, in_flight, at_s=7.0):
    """When the next step is due, after these steps and with others in flight."""
    pacer = pacer_after(*steps)
    for num_prompt_tokens, num_decodes in in_flight:
        pacer.on_sent(plan_of(num_prompt_tokens, num_decodes), at_s)
    return pacer.next_due_s


KNOWN = [(0, 8, 0.01), (100, 0, 0.1)]


def test_the_next_step_is_due_shortly_before_the_one_in_flight_ends():
    assert next_due_s(*KNOWN, in_flight=[(50, 0)]) == pytest.approx(7.03), "20 ms before"
    assert next_due_s(*KNOWN, in_flight=[(400, 0)]) == pytest.approx(7.3), "a quarter before"
    assert next_due_s(*KNOWN, in_flight=[(390, 8)]) == pytest.approx(7.3), "decodes count, too"


def test_the_next_step_is_due_at_once_after_a_short_or_unknown_one():
    assert next_due_s(*KNOWN, in_flight=[]) == -math.inf
    assert next_due_s(*KNOWN, in_flight=[(0, 8)]) < 7
    assert next_due_s(*KNOWN, in_flight=[(0, 0)]) < 7, "it waits for the disk"
    assert next_due_s(in_flight=[(400, 0)]) == -math.inf


def test_a_step_begins_when_the_one_before_it_is_answered():
    pacer = pacer_after(*KNOWN)
    pacer.on_sent(plan_of(100, 0), 1.0)
    pacer.on_sent(plan_of(400, 0), 1.05)
    pacer.on_result(0.1, 1.1)
    assert pacer.next_due_s == pytest.approx(1.4)


def test_a_wait_behind_the_step_before_does_not_make_the_next_one_late():
    pacer = pacer_after()
    now_s = 0.0
    pacer.on_sent(plan_of(0, 8), now_s)
    for _ in range(40):  # each is launched when the one before begins, and takes 0.1 s itself
        pacer.on_sent(plan_of(0, 8), now_s)
        now_s += 0.1
        pacer.on_result(0.2, now_s)
    assert pacer.next_due_s - now_s == pytest.approx(0.075, abs=0.005)


def test_what_a_few_tokens_pay_for_a_step_is_not_expected_of_each_of_many():
    few = (20, 0, 0.1)  # 5 ms each, nearly all of it in the step
    assert next_due_s((100, 0, 0.1), *[few] * 20, in_flight=[(400, 0)]) == pytest.approx(7.3)
