"""Consecutive losses without progress are counted."""

import pytest
from scheduler_requests import make_request

from scheduler_svc.core.interface.events import Finished
from scheduler_svc.core.interface.request import FinishReason
from scheduler_svc.core.reports.progress import Progress
from scheduler_svc.workers.crash_counter import CrashCounter


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
