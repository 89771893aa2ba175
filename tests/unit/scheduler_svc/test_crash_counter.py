"""Consecutive losses without progress are counted; the core decides what progress is."""

import numpy as np
import pytest
from scheduler_requests import make_request

from contract.arrays import ints
from contract.step import Result
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.interface.events import Finished
from scheduler_svc.core.interface.request import BeamParams, FinishReason, OutputSoFar
from scheduler_svc.core.reports.progress import Progress, read_progress
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.workers.crash_counter import CrashCounter


class Core:
    """A core whose worker answers a step when a test releases it."""

    def __init__(self, **changes):
        settings = {"num_blocks": 16, "max_num_seqs": 4, "max_num_batched_tokens": 16, **changes}
        self.core = Scheduler(SchedulerConfig(block_size=4, max_model_len=32, **settings))
        self.plan = None

    def submit(self, request):
        self.core.submit(request, 0.0)
        return request

    def send(self):
        self.plan = self.core.schedule(0.0)

    def answer(self, *rows, **candidates):
        """Each row samples token 7."""
        tokens = ints([7] * len(rows))
        outcome = Result(self.plan.step_id, ints([*rows]), tokens, ints([]), ints([]), **candidates)
        self.core.update(outcome)

    def progress(self, request):
        return read_progress(self.core, request)


def test_a_request_in_the_queue_has_waited():
    core = Core(max_num_seqs=1)
    first, second = core.submit(make_request(key=0)), core.submit(make_request(key=1))
    assert core.progress(first) is Progress.WAITED, "it was not sent"
    core.send()
    assert (core.progress(first), core.progress(second)) == (Progress.NONE, Progress.WAITED)


def test_only_tokens_gained_since_it_got_its_row_count():
    core = Core()
    before = OutputSoFar(np.array([8, 9], np.int32), finished=False)
    request = core.submit(make_request(outputs=(before,)))
    core.send()
    assert core.progress(request) is Progress.NONE
    core.answer(0)
    assert core.progress(request) is Progress.SOME


def test_a_preempted_request_has_waited_and_begins_again():
    core = Core(num_blocks=2, enable_prefix_caching=False, watermark=0.0)
    first, second = core.submit(make_request(key=0)), core.submit(make_request(key=1))
    core.send()
    core.answer(0, 1)
    assert core.progress(second) is Progress.SOME
    for _ in range(2):  # until the first sequence needs the block of the second
        core.send()
        core.answer(*([0, 1] if core.core.owner(1) else [0]))
    core.send()
    assert core.progress(second) is Progress.WAITED
    core.core.cancel(1, [0])
    core.answer()
    core.send()
    assert core.progress(first) is Progress.WAITED, "it has ended"
    assert core.progress(second) is Progress.NONE


def test_one_output_that_gains_is_enough():
    core = Core()
    nothing = OutputSoFar(np.empty(0, np.int32), finished=False)
    request = core.submit(make_request(n=2, outputs=(nothing, nothing)))
    core.send()
    assert core.progress(request) is Progress.NONE
    core.answer(1)
    assert core.progress(request) is Progress.SOME


def test_a_search_gains_when_a_beam_is_longer_than_the_prompt():
    core = Core()
    request = core.submit(make_request(n=2, beam=BeamParams(2, ())))
    core.send()
    assert core.progress(request) is Progress.NONE
    core.answer(
        0,
        candidate_rows=ints([0]),
        candidate_counts=ints([4]),
        candidate_token_ids=ints([5, 6, 7, 8]),
        candidate_logprobs=np.array([-1, -2, -3, -4], np.float32),
    )
    core.send()
    assert core.progress(request) is Progress.SOME


@pytest.mark.parametrize(
    ("progress", "count"), [(Progress.WAITED, 2), (Progress.NONE, 3), (Progress.SOME, 0)]
)
def test_a_loss_counts_if_the_request_ran_and_gained_nothing(progress, count):
    crashes, request = CrashCounter(), make_request(n=2)
    crashes.set(request, 2)
    assert crashes.take_after_loss(request, progress) == count
    assert crashes.take(request) == 0, "it has been taken"


def test_ended_requests_are_forgotten():
    crashes, ended, dropped = CrashCounter(), make_request(key=0), make_request(source=2, key=1)
    for request in (ended, dropped):
        crashes.set(request, 1)
    crashes.on_finished((Finished(1, 0, FinishReason.STOP),))
    crashes.drop_source(2)
    assert [crashes.take(request) for request in (ended, dropped)] == [0, 0]
