"""The measure of fragmentation equals a count by hand."""

import numpy as np
import pytest
from core_driver import answer, make_core, schedule, submit
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.compact.fragmentation import Fragmentation, FragmentationLevel, measure
from scheduler_svc.core.reports.load import read_space


@given(st.lists(st.integers(0, 2), max_size=40))
def test_it_equals_a_count_of_every_run(counts):
    runs = "".join("." if count == 0 else "x" for count in counts).split("x")
    measured = measure(np.array(counts, np.int32))
    assert measured == Fragmentation(counts.count(0), max(map(len, runs)))


@pytest.mark.parametrize(
    ("num_free", "longest", "rate", "level"),
    [
        (0, 0, 0.0, FragmentationLevel.LOW),
        (10, 10, 0.0, FragmentationLevel.LOW),
        (100, 81, 0.19, FragmentationLevel.LOW),
        (10, 8, 0.2, FragmentationLevel.MEDIUM),
        (100, 51, 0.49, FragmentationLevel.MEDIUM),
        (10, 5, 0.5, FragmentationLevel.HIGH),
        (10, 1, 0.9, FragmentationLevel.HIGH),
    ],
)
def test_levels(num_free, longest, rate, level):
    fragmentation = Fragmentation(num_free, longest)
    assert fragmentation.rate == pytest.approx(rate)
    assert fragmentation.level is level


def test_occupancy_is_of_the_slots_that_running_sequences_hold():
    core = make_core(max_num_batched_tokens=10)
    assert read_space(core).occupancy == 1.0
    submit(core, 0, range(6))
    submit(core, 1, range(50, 59))
    first = schedule(core)  # 6 of 6 and 4 of 9 tokens
    space = read_space(core)
    assert (space.num_slots_written, space.num_slots_held) == (5 + 4, 8 + 12)
    assert space.occupancy == 0.45
    assert (space.device.num_free_blocks, space.device.longest_free_run) == (11, 11)
    assert (space.host.num_free_blocks, space.host.rate) == (0, 0.0)
    answer(core, first, 0)
    assert read_space(core).num_slots_written == 6 + 4
