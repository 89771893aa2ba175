"""A sequence's states, and the trace that its steps belong to."""

from dataclasses import replace

import pytest
from core_driver import answer, make_core, schedule, submit
from test_beam_groups import LIKELY, report, search

from scheduler_svc.core.interface.errors import BrokenInvariantError
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SeqStatus


def test_a_transition_that_no_part_makes_is_a_bug():
    core = make_core()
    submit(core, 0, [1])
    (seq,) = core.live
    with pytest.raises(BrokenInvariantError, match=r"sequence 1: SeqStatus.WAITING to .*DECODE"):
        seq.set_status(SeqStatus.DECODE)
    assert seq.status is SeqStatus.WAITING


def traced(core: Scheduler, config) -> Scheduler:
    """A core with the request of another one, which is traced."""
    (request,) = {seq.request for seq in core.live}
    traced_core = Scheduler(config)
    traced_core.submit(replace(request, traceparent="trace"), 0.0)
    return traced_core


def test_a_search_is_traced_as_one_sequence():
    core = make_core()
    search(core, 0, [1, 2, 3])
    core = traced(core, core.config)
    plan = schedule(core)
    assert [each.traceparent for each in plan.new_sequences] == ["trace"]
    report(core, plan, r0=LIKELY)
    assert [each.traceparent for each in schedule(core).new_sequences] == ["", ""]


def test_a_sequence_that_resumes_is_traced():
    core = make_core()
    submit(core, 0, [1, 2, 3], traceparent="trace")
    answer(core, schedule(core), 0)
    (seq,) = core.live
    core.preemption.preempt(seq)
    (resumed,) = schedule(core).new_sequences
    assert resumed.traceparent == "trace"
