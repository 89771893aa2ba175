"""A removed adapter is kept until no row uses it."""

import numpy as np
import pytest

from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan
from contract.worker_limits import Limits
from gpu_worker.lora.step_adapters import AdapterTable
from gpu_worker.step.rows import Rows

LIMITS = Limits(
    max_num_seqs=3,
    max_model_len=32,
    max_num_batched_tokens=16,
    num_blocks=12,
    block_size=4,
    vocab_size=50,
)
SQL, CHAT = object(), object()


@pytest.fixture
def rows():
    return Rows(LIMITS)


def step(step_id, *, new=(), released=()):
    """A step that computes nothing; `new` are rows and the adapters of each."""
    return Plan(
        step_id,
        0,
        released_rows=np.array(released, np.int32),
        new_sequences=tuple(
            NewSequence(
                seq_id=1,
                row=row,
                token_ids=np.array([5, 6], np.int32),
                num_prompt_tokens=2,
                num_computed_tokens=0,
                block_ids=np.array([row], np.int32),
                sampling=SamplingParams(seed=0),
                max_total_tokens=8,
                adapter=adapter,
            )
            for row, adapter in new
        ),
    )


def test_an_unused_adapter_is_freed_at_once(rows):
    table = AdapterTable({1: SQL, 2: CHAT}, rows.adapters_in_use)
    rows.apply(step(1, new=[(0, 2)]))
    table.remove(1)
    assert table.by_number == {2: CHAT}


def test_a_used_adapter_is_freed_with_its_last_row(rows):
    table = AdapterTable({1: SQL}, rows.adapters_in_use)
    rows.apply(step(1, new=[(0, 1), (2, 1), (1, 0)]))
    table.remove(1)
    for step_id, released, left in ((2, [0, 1], {1: SQL}), (3, [2], {})):
        rows.apply(step(step_id, released=released))
        table.free_unused()
        assert table.by_number == left


def test_a_new_attachment_frees_what_the_rows_before_had(rows):
    table = AdapterTable({1: SQL}, rows.adapters_in_use)
    rows.apply(step(1, new=[(0, 1)]))
    table.remove(1)
    rows.clear()
    table.free_unused()
    assert not table.by_number


def test_added_adapters_are_visible_in_earlier_views(rows):
    table = AdapterTable({}, rows.adapters_in_use)
    seen = table.by_number
    table.add(1, CHAT)
    assert seen == {1: CHAT}
