"""When a step's first tokens get a head start before the next step."""

import numpy as np
import pytest

from gpu_worker.step.rows import ScheduledRows
from gpu_worker.step.timing import HEAD_START_S, head_start_s

PROMPTS = np.full(8, 100)
"""The lengths of the rows' prompts."""


def start_s(positions, *, execute_s=0.1, num_decodes=0, num_drafting=0):
    """The head start after a step in which each row samples at one of `positions`."""
    rows = np.arange(len(positions))
    scheduled = ScheduledRows(
        rows=rows,
        starts=np.zeros_like(rows),
        lens=np.ones_like(rows),
        num_decodes=num_decodes,
        sampling=rows,
        positions=np.array(positions, np.int64),
        incarnations=np.zeros_like(rows),
        num_drafting=num_drafting,
    )
    return head_start_s(scheduled, PROMPTS, execute_s)


def test_a_first_token_gets_a_head_start_if_no_other_row_decodes():
    assert start_s([100]) == HEAD_START_S
    assert start_s([130, 100]) == HEAD_START_S
    assert start_s([130, 100], num_decodes=1) == 0
    assert start_s([130, 100], num_drafting=1) == 0


def test_later_tokens_get_no_head_start():
    assert start_s([]) == 0, "of a prompt that is not complete"
    assert start_s([101, 130]) == 0, "of beams, or of sequences that are computed again"


@pytest.mark.parametrize("execute_s", [0.0, 0.001, 0.05])
def test_a_step_that_is_short_is_followed_at_once(execute_s):
    assert start_s([100], execute_s=execute_s) == 0


def test_a_head_start_costs_a_thirtieth_at_most():
    shortest = min(s for s in np.linspace(0.001, 0.2, 400) if start_s([100], execute_s=s))
    assert shortest >= 30 * HEAD_START_S
