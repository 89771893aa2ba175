"""A worker's rates, measured from its steps."""

import numpy as np
import pytest

from contract.step import Plan, StepId
from scheduler_svc.core.limits.acceptance import WorkerRates
from scheduler_svc.observers.rate_meter import RateMeter


def measure(*steps, max_prompt_tokens=None) -> WorkerRates:
    """The rates after steps (prompt tokens, decodes, seconds); 100 tokens keep the device busy."""
    meter = RateMeter(busy_step_tokens=100)
    for num_prompt_tokens, num_decodes, _ in steps:
        meter.on_sent(
            Plan(
                StepId(1),
                num_decodes,
                chunk_rows=np.array([0], np.int32),
                chunk_lens=np.array([num_prompt_tokens], np.int32),
            ),
            max_prompt_tokens,
        )
    for *_, execute_s in steps:
        meter.on_result(execute_s)
    return meter.rates


def test_nothing_is_known_before_a_step():
    assert measure() == WorkerRates(None, None)


def test_a_full_step_tells_of_prompts_and_one_without_prompts_of_steps():
    assert measure((80, 20, 0.5), (0, 7, 0.02)) == WorkerRates(200.0, 0.02)


def test_a_small_step_says_little_of_prompts():
    assert measure((8, 0, 0.02), (30, 19, 0.02)) == WorkerRates(None, None)


def test_a_step_that_has_all_that_there_is_time_for_tells_of_prompts():
    assert measure((20, 0, 1.0), max_prompt_tokens=20) == WorkerRates(20.0, None)
    assert measure((19, 0, 1.0), max_prompt_tokens=20) == WorkerRates(None, None)


def test_the_best_counts_and_is_forgotten_slowly():
    rates = measure((100, 0, 0.5), (100, 0, 1.0), (0, 1, 0.01), (0, 1, 0.05))
    assert rates.prefill_tokens_per_s == pytest.approx(198.0)
    assert rates.step_s == pytest.approx(0.01 / 0.99)


def test_a_worker_that_does_not_measure_reports_no_rates():
    assert measure((100, 0, 0.0), (0, 5, 0.0)) == WorkerRates(None, None)
