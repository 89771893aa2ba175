"""Examples of a core whose worker is short of memory."""

import pytest
from core_driver import ROUTER, answer, chunks, make_core, new, outs, schedule, submit

from contract.info import MemoryLevel
from scheduler_svc.core.interface.config import PreemptionMode
from scheduler_svc.core.interface.request import BeamParams
from scheduler_svc.core.limits.memory_pressure import Pressure

OK, WARNING, CRITICAL = MemoryLevel
HOST = {
    "num_host_blocks": 16,
    "preemption_mode": PreemptionMode.SWAP,
    "enable_prefix_caching": False,
}


def run_some(core, num_seqs, **fields):
    """Run `num_seqs` sequences of one block each to their first token; return the rows."""
    for key in range(num_seqs):
        submit(core, key, [key, key], max_tokens=20, **fields)
    plan = schedule(core)
    rows = [row for row, _, _ in new(plan)]
    assert len(rows) == num_seqs
    answer(core, plan, *rows)
    return rows


def step(core, now=0.0):
    """Give each running sequence one token; return the plan."""
    plan = schedule(core, now)
    rows = [seq.row for seq in core.running if seq.status.name == "DECODE"]
    answer(core, plan, *rows)
    return plan


def num_running(core):
    return core.load().num_running


def test_at_warning_no_more_sequences_run():
    core = make_core()
    run_some(core, 2)
    core.set_memory_level(WARNING)
    submit(core, 2, [7, 7])
    for _ in range(5):
        assert not new(step(core))
    assert (num_running(core), core.load().num_waiting) == (2, 1)
    assert core.load().num_preemptions == 0


def test_at_warning_an_ended_sequence_makes_room_for_the_next():
    core = make_core()
    run_some(core, 2)
    core.set_memory_level(WARNING)
    submit(core, 2, [7, 7])
    submit(core, 3, [8, 8])
    core.cancel(ROUTER, [0])
    assert len(new(schedule(core))) == 1
    assert (num_running(core), core.load().num_waiting) == (2, 1)


@pytest.mark.parametrize("level", [WARNING, CRITICAL])
def test_one_may_start_where_nobody_runs_and_only_one(level):
    core = make_core()
    core.set_memory_level(level)
    submit(core, 0, [1, 1], max_tokens=1)
    submit(core, 1, [2, 2], max_tokens=1)
    for _ in range(2):
        plan = schedule(core)
        ((row, _, _),) = new(plan)
        answer(core, plan, row)
        answer(core, schedule(core)) if core.load().num_running else None
    assert core.load().num_waiting == 0


def test_all_start_when_there_is_enough_again():
    core = make_core()
    run_some(core, 2)
    core.set_memory_level(WARNING)
    for key in range(2, 6):
        submit(core, key, [key, key])
    step(core)
    core.set_memory_level(OK)
    assert len(new(schedule(core))) == 4


def test_prompts_are_computed_in_halves_at_warning_and_in_quarters_when_critical():
    core = make_core(max_num_batched_tokens=32, long_prefill_threshold=0)
    submit(core, 0, range(60), max_tokens=2)
    core.set_memory_level(WARNING)
    plan = schedule(core)
    assert sum(chunks(plan).values()) == 16
    answer(core, plan)
    core.set_memory_level(CRITICAL)
    plan = schedule(core)
    assert sum(chunks(plan).values()) == 8
    answer(core, plan)
    core.set_memory_level(OK)
    assert sum(chunks(schedule(core)).values()) == 32


def test_the_bound_of_the_caller_holds_if_it_is_less():
    core = make_core(max_num_batched_tokens=32, long_prefill_threshold=0)
    submit(core, 0, range(60), max_tokens=2)
    core.set_memory_level(WARNING)
    assert sum(chunks(core.schedule(0.0, None, 5)).values()) == 5


def test_when_critical_the_last_half_is_preempted_and_halved_again_while_it_lasts():
    core = make_core()
    run_some(core, 8)
    core.set_memory_level(CRITICAL)
    step(core, now=100.0)
    assert [seq.seq_key for seq in core.running] == [0, 1, 2, 3]
    step(core, now=109.0)
    assert num_running(core) == 4
    step(core, now=110.0)
    assert num_running(core) == 2
    step(core, now=120.0)
    step(core, now=130.0)
    assert num_running(core) == 1, "one goes on whatever happens"
    assert core.load().num_memory_preemptions == core.load().num_preemptions == 7
    core.set_memory_level(WARNING)
    step(core, now=140.0)
    assert num_running(core) == 1, "it is no reason to have more run"
    core.set_memory_level(OK)
    step(core, now=141.0)
    assert num_running(core) == 8


def test_when_critical_half_of_those_that_still_run_go_on():
    core = make_core()
    run_some(core, 8)
    core.set_memory_level(WARNING)
    core.cancel(ROUTER, [0, 1, 2, 3])
    core.set_memory_level(CRITICAL)
    step(core)
    assert [seq.seq_key for seq in core.running] == [4, 5]


def test_the_smallest_budget_lets_a_prompt_go_on_when_critical():
    core = make_core(max_num_batched_tokens=3, max_num_seqs=3)
    core.set_memory_level(CRITICAL)
    submit(core, 0, range(5))
    assert sum(chunks(schedule(core)).values()) == 1


def test_a_level_that_comes_back_does_not_halve_sooner():
    core = make_core()
    run_some(core, 8)
    core.set_memory_level(CRITICAL)
    step(core, now=100.0)
    core.set_memory_level(WARNING)
    core.set_memory_level(CRITICAL)
    step(core, now=105.0)
    assert num_running(core) == 4
    step(core, now=110.0)
    assert num_running(core) == 2


def test_a_preempted_sequence_is_swapped_out_if_that_makes_room():
    core = make_core(**HOST)
    run_some(core, 2)
    core.set_memory_level(CRITICAL)
    assert len(outs(schedule(core))) == 1
    assert core.load().num_swapped == 1


def test_a_preempted_sequence_is_not_swapped_out_into_the_same_memory():
    core = make_core(**HOST, host_is_device_memory=True)
    run_some(core, 2)
    core.set_memory_level(CRITICAL)
    assert not outs(schedule(core))
    assert (core.load().num_swapped, core.load().num_waiting) == (0, 1)


def test_siblings_wait_for_their_turn_as_others_do():
    core = make_core()
    core.set_memory_level(WARNING)
    submit(core, 0, [1] * 6, n=3, max_tokens=2)
    plan = schedule(core)
    assert (num_running(core), core.load().num_waiting) == (1, 2)
    for _ in range(20):
        answer(core, plan, *(seq.row for seq in core.running))
        assert num_running(core) <= 1
        if (plan := core.schedule(0.0)) is None:
            break
    assert core.load().num_waiting == 0


def test_a_search_runs_whole_or_not_at_all():
    core = make_core(num_blocks=32)
    core.set_memory_level(CRITICAL)
    beam = BeamParams(width=4, end_token_ids=())
    submit(core, 0, [1] * 6, beam=beam)
    assert len(new(schedule(core))) == 1, "alone it may, however wide it is"
    submit(core, 10, [2] * 6)
    assert core.schedule(0.0) is None, "the search waits for its result, and no sequence starts"
    assert core.load().num_waiting == 1


def test_a_search_counts_as_many_sequences_as_it_has_beams():
    core = make_core(num_blocks=32)
    run_some(core, 1)
    submit(core, 10, [1] * 6, beam=BeamParams(width=4, end_token_ids=()))
    schedule(core)
    core.set_memory_level(CRITICAL)
    assert schedule(core).released_rows.tolist() == [1], "five rows are more than two"
    assert core.load().num_memory_preemptions == 1


def test_of_two_searches_one_is_preempted():
    core = make_core(num_blocks=32)
    for key in (0, 10):
        submit(core, key, [key] * 3, beam=BeamParams(width=2, end_token_ids=()))
    schedule(core)
    core.set_memory_level(CRITICAL)
    schedule(core)
    assert num_running(core) == 1


def test_a_repeated_level_changes_no_bound():
    pressure = Pressure()
    pressure.set_level(WARNING, 6)
    pressure.set_level(WARNING, 2)
    assert pressure.max_running == 6
    pressure.set_level(CRITICAL, 6)
    pressure.halve_max_running(0.0, 6)
    pressure.set_level(CRITICAL, 6)
    pressure.halve_max_running(1.0, 3)
    assert pressure.max_running == 3
