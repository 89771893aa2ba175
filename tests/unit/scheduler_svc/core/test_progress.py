"""How far requests have got since their sequences got rows."""

import numpy as np
from core_driver import ROUTER, answer, make_core, schedule, submit
from test_beam_groups import LIKELY, report, search
from test_host_tier import make_swapping_in

from scheduler_svc.core.interface.request import OutputSoFar
from scheduler_svc.core.reports.progress import Progress, read_progress

NOTHING = OutputSoFar(np.empty(0, np.int32), finished=False)


def progress(core, key):
    """The progress of the request whose first sequence has this key."""
    (seq,) = core.live.find(ROUTER, [key])
    return read_progress(core, seq.request)


def test_a_request_in_the_queue_has_waited():
    core = make_core(max_num_seqs=1)
    for key in range(2):
        submit(core, key, [1])
    assert progress(core, 0) is Progress.WAITED, "it was not sent"
    schedule(core)
    assert (progress(core, 0), progress(core, 1)) == (Progress.NONE, Progress.WAITED)


def test_only_tokens_gained_since_it_got_its_row_count():
    core = make_core()
    before = OutputSoFar(np.array([8, 9], np.int32), finished=False)
    submit(core, 0, [1], outputs=(before,))
    plan = schedule(core)
    assert progress(core, 0) is Progress.NONE
    answer(core, plan, 0)
    assert progress(core, 0) is Progress.SOME


def test_a_preempted_request_has_waited_and_begins_again():
    core = make_core(enable_prefix_caching=False)
    for key in range(2):
        submit(core, key, [1])
    answer(core, schedule(core), 0, 1)
    assert progress(core, 1) is Progress.SOME
    plan = schedule(core)
    (seq,) = core.live.find(ROUTER, [1])
    core.preemption.preempt(seq)
    assert progress(core, 1) is Progress.WAITED
    answer(core, plan, 0)
    schedule(core)
    assert progress(core, 1) is Progress.NONE


def test_an_ended_request_has_waited():
    core = make_core()
    submit(core, 0, [1])
    (seq,) = core.live
    answer(core, schedule(core), 0)
    core.cancel(ROUTER, [0])
    assert read_progress(core, seq.request) is Progress.WAITED


def test_one_output_that_gains_is_enough():
    core = make_core()
    submit(core, 0, [1], n=2, outputs=(NOTHING, NOTHING))
    submit(core, 2, [1])
    plan = schedule(core)
    answer(core, plan, 1, 2)
    assert [progress(core, key) for key in (0, 2)] == [Progress.SOME, Progress.SOME]


def test_one_output_that_was_sent_is_enough():
    core = make_core(max_num_seqs=1)
    submit(core, 0, [1], n=2, outputs=(NOTHING, NOTHING))
    submit(core, 2, [1])
    plan = schedule(core)
    assert progress(core, 0) is Progress.NONE, "though one output waits for a row"
    answer(core, plan, 0)
    assert [progress(core, key) for key in (0, 2)] == [Progress.SOME, Progress.WAITED]


def test_a_request_whose_kv_is_being_swapped_in_has_waited():
    core, _ = make_swapping_in()
    assert core.load().num_running == 1
    assert progress(core, 1) is Progress.WAITED


def test_a_search_gains_when_a_beam_is_longer_than_the_prompt():
    core = make_core()
    search(core, 0, [1, 2], n=2, end_token_ids=(9,))
    plan = schedule(core)
    assert progress(core, 0) is Progress.NONE
    report(core, plan, r0=LIKELY)
    plan = schedule(core)
    assert progress(core, 0) is Progress.SOME
    report(core, plan, r0={9: -0.1}, r1={5: -0.1})
    schedule(core)  # only the beam in row 1 goes on
    assert progress(core, 0) is Progress.SOME
