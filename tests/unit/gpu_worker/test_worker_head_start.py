import numpy as np
import pytest

from gpu_worker.head_start import HEAD_START_S, head_start_s
from gpu_worker.rows import ScheduledRows


def scheduled(*, num_decodes=0, num_drafting=0, num_prompts=1, num_sampling=1):
    rows = np.arange(num_decodes + num_drafting + num_prompts)
    sampling = np.arange(num_sampling)
    return ScheduledRows(
        rows=rows,
        starts=np.zeros_like(rows),
        lens=np.ones_like(rows),
        num_decodes=num_decodes,
        sampling=sampling,
        positions=np.ones_like(sampling),
        incarnations=np.zeros_like(rows),
        num_drafting=num_drafting,
    )


def test_a_first_token_gets_a_head_start_where_nobody_else_waits_for_the_next_step():
    assert head_start_s(scheduled(), 0.1) == HEAD_START_S
    assert head_start_s(scheduled(num_prompts=3, num_sampling=2), 0.1) == HEAD_START_S
    assert head_start_s(scheduled(num_decodes=1, num_sampling=2), 0.1) == 0
    assert head_start_s(scheduled(num_drafting=1, num_sampling=2), 0.1) == 0
    assert head_start_s(scheduled(num_sampling=0), 0.1) == 0  # a prompt that is not complete


@pytest.mark.parametrize("execute_s", [0.0, 0.001, 0.05])
def test_a_step_that_is_short_is_followed_at_once(execute_s):
    assert head_start_s(scheduled(), execute_s) == 0


def test_a_head_start_costs_three_hundredths_at_most():
    shortest = min(s for s in np.linspace(0.001, 0.2, 400) if head_start_s(scheduled(), s))
    assert HEAD_START_S / shortest <= 0.034
