"""Where a request goes whose prefix was copied to a worker for it."""

from types import SimpleNamespace

import pytest
from scheduler_requests import make_request

from contract.errors import TooBusyError
from contract.info import Role
from rpc.health import Health
from scheduler_svc.domain import SubmitRequest
from scheduler_svc.observers.spans import SequenceSpans
from scheduler_svc.routers.fan_out import RouterStreams
from scheduler_svc.workers.fleet import Fleet
from scheduler_svc.workers.placement import Placer, WorkerLoad

MAX_WAITING = 4


class Session:
    is_draining = False
    role = Role.BOTH
    block_size = 2
    info = SimpleNamespace(has_far_kv=False)

    def __init__(self, num_waiting, *, hangs=False):
        self.num_waiting, self.hangs = num_waiting, hangs
        self.posted = []

    def placement_load(self):
        return WorkerLoad(0, self.num_waiting, MAX_WAITING, max_request_len=99)

    def num_held_tokens(self, request):  # noqa: ARG002
        return 0

    def num_cached_blocks(self, hashes):  # noqa: ARG002
        return 0

    def trouble(self):
        return "it hangs" if self.hangs else None

    def post(self, command, num_tokens):  # noqa: ARG002
        self.posted.append(command)


def place(*sessions, was_accepted=False):
    """Place a request whose prefix is at the first of the sessions."""
    fleet = Fleet(
        streams=RouterStreams(1 << 20),
        spans=SequenceSpans(),
        health=Health(),
        max_waiting=MAX_WAITING,
        step_timeout_s=60.0,
        placer=Placer(),
    )
    for number, session in enumerate(sessions):
        fleet.roster.add(SimpleNamespace(target=f"w{number}", session=session))
    command = SubmitRequest(make_request(), was_accepted=was_accepted)
    fleet._place(command, sessions[0])
    return command


def test_it_goes_to_its_worker_even_if_another_one_is_less_busy():
    chosen, other = Session(MAX_WAITING - 1), Session(0)
    command = place(chosen, other)
    assert (chosen.posted, other.posted) == ([command], [])


def test_it_goes_to_another_worker_if_its_own_has_filled_up():
    chosen, other = Session(MAX_WAITING), Session(MAX_WAITING - 1)
    command = place(chosen, other)
    assert (chosen.posted, other.posted) == ([], [command])


def test_one_that_was_accepted_before_goes_to_its_worker_however_full_it_is():
    chosen, other = Session(MAX_WAITING), Session(0)
    command = place(chosen, other, was_accepted=True)
    assert (chosen.posted, other.posted) == ([command], [])


def test_it_goes_to_another_worker_if_its_own_hangs():
    chosen, other = Session(0, hangs=True), Session(MAX_WAITING - 1)
    command = place(chosen, other)
    assert (chosen.posted, other.posted) == ([], [command])


def test_it_is_refused_only_if_all_workers_are_full():
    with pytest.raises(TooBusyError, match="4 sequences wait"):
        place(Session(MAX_WAITING), Session(MAX_WAITING))
