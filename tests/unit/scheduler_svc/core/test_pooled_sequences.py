"""Sequences whose prompts become vectors, and workers that take whole prompts only."""

import pytest
from core_driver import answer, chunks, make_core, new, schedule, submit

from contract.info import MemoryLevel


def test_a_sequence_that_pools_ends_with_its_prompt():
    core = make_core()
    submit(core, 0, [1] * 10, max_tokens=1, pools=True)
    plan = schedule(core)
    assert plan.new_sequences[0].identity == b"", "a later scheduler would find no vector"
    events = answer(core, plan, 0)
    assert [end.seq_key for end in events.finished] == [0]
    assert core.load().num_running == 0


@pytest.mark.parametrize("pools", [False, True])
def test_a_preempted_sequence_that_pools_starts_over(pools):
    """The worker's row held a part of the vector, which is lost with the row."""
    core = make_core(num_host_blocks=8, max_num_batched_tokens=8)
    submit(core, 0, [2] * 12, max_tokens=1, pools=pools, reads_prefix_cache=False)
    answer(core, schedule(core))
    (seq,) = core.live
    core.preemption.preempt(seq, must_swap=True)
    assert core.load().num_swapped == (not pools)
    plan = schedule(core)
    assert [computed for _, computed, _ in new(plan)] == [0 if pools else 8]


def test_whole_prompts_wait_for_a_step_with_room():
    core = make_core(
        num_blocks=64, takes_whole_prompts=True, max_num_batched_tokens=64, max_prefill_chunk=8
    )
    for key, length in enumerate((40, 20, 10, 34, 63)):
        submit(core, key, [key + 1] * length, max_tokens=1, pools=True)
    plan = schedule(core)
    assert chunks(plan) == {0: 40, 1: 20}, "the next one does not fit, and is not overtaken"
    second = schedule(core)
    assert chunks(second) == {2: 10, 3: 34}
    answer(core, plan, 0, 1)
    answer(core, second, 2, 3)
    assert list(chunks(schedule(core)).values()) == [63]


def test_short_memory_stops_no_whole_prompt():
    core = make_core(num_blocks=64, takes_whole_prompts=True)
    core.set_memory_level(MemoryLevel.CRITICAL)
    submit(core, 0, [1] * 60, max_tokens=1, pools=True)
    assert chunks(schedule(core)) == {0: 60}


def test_a_step_has_time_for_the_longest_whole_prompt():
    core = make_core(num_blocks=64, takes_whole_prompts=True, max_num_batched_tokens=128)
    for key, length in enumerate((60, 3, 1)):
        submit(core, key, [key + 1] * length, max_tokens=1, pools=True)
    plan = core.schedule(0.0, None, 5)
    assert chunks(plan) == {0: 60, 1: 3}, "a prompt has at most 63 tokens"
