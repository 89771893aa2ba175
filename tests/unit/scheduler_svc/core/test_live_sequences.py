"""Siblings that end before they fork, events of admission, and the requests of a lost worker."""

from dataclasses import replace

from core_driver import ROUTER, answer, make_core, new, schedule, submit

from scheduler_svc.core.interface.request import SourceId
from scheduler_svc.core.invariants import check


def test_a_sibling_that_is_cancelled_before_it_forks_leaves_the_others():
    core = make_core()
    submit(core, 0, [1] * 4)
    submit(core, 1, [2] * 5, n=4)
    (end,) = core.cancel(ROUTER, [3])
    check(core)
    assert end.seq_key == 3
    assert core.load().num_waiting == 4
    plan = schedule(core)
    assert [core.owner(row) for row in range(5)] == [
        *((ROUTER, key) for key in (0, 1, 2, 4)),
        None,
    ]
    answer(core, plan, 0, 1)
    assert core.load().num_waiting == 0


def test_a_sequence_is_admitted_once():
    core = make_core()
    submit(core, 0, [1] * 9)
    admitted = answer(core, schedule(core), 0).admitted
    assert [(each.seq_key, each.num_cached_tokens) for each in admitted] == [(0, 0)]
    (seq,) = core.live
    core.preemption.preempt(seq)
    plan = schedule(core)
    assert [num_computed for _, num_computed, _ in new(plan)] == [8]
    assert answer(core, plan, 0).admitted == ()
    assert seq.num_cached_tokens == 0, "what it had itself computed does not count"


def test_a_lost_worker_gives_its_requests_back_oldest_first():
    core = make_core()
    submit(core, 5, [1])
    (seq,) = core.live
    core.submit(replace(seq.request, source=SourceId(7), first_seq_key=2), now=6.0)
    submit(core, 1, [3])
    assert [request.first_seq_key for request in core.drain()] == [5, 2, 1]


def test_a_source_gets_the_tokens_of_its_own_sequences():
    core = make_core()
    submit(core, 5, [1])
    (seq,) = core.live
    core.submit(replace(seq.request, source=SourceId(7), first_seq_key=2), now=6.0)
    events = answer(core, schedule(core), 0, 1)
    assert list(zip(events.sources.tolist(), events.seq_keys.tolist(), strict=True)) == [
        (ROUTER, 5),
        (7, 2),
    ]
