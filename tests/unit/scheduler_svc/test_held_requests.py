"""Requests that wait for a worker: held in order, cancelled, dropped with their router."""

from scheduler_requests import make_request

from scheduler_svc.core.beam_search import BeamParams
from scheduler_svc.core.request import FinishReason
from scheduler_svc.domain import SubmitRequest
from scheduler_svc.held_requests import HeldRequests


class TestHeldRequests:
    def test_requests_come_out_in_order(self):
        held = HeldRequests()
        commands = [SubmitRequest(make_request(key=key)) for key in (3, 1, 2)]
        for command in commands:
            held.add(command)
        assert held.num_seqs == 3
        assert held.take_all() == commands
        assert held.num_seqs == 0

    def test_cancel_ends_some_sequences_of_a_request(self):
        held = HeldRequests()
        held.add(SubmitRequest(make_request(key=10, n=3), was_accepted=True))
        finished = held.cancel(1, [11, 12, 99])
        assert [(end.seq_key, end.reason) for end in finished] == [
            (11, FinishReason.CANCELLED),
            (12, FinishReason.CANCELLED),
        ]
        (command,) = held.take_all()
        assert command.was_accepted
        assert [output.finished for output in command.request.outputs] == [False, True, True]

    def test_cancel_ends_a_search_as_a_whole(self):
        held = HeldRequests()
        held.add(SubmitRequest(make_request(key=10, n=2, beam=BeamParams(3, ()))))
        assert [end.seq_key for end in held.cancel(1, [11])] == [10, 11]
        assert held.take_all() == []

    def test_cancelled_sequence_does_not_end_again(self):
        held = HeldRequests()
        held.add(SubmitRequest(make_request(key=10, n=2)))
        held.cancel(1, [10])
        assert held.cancel(1, [10]) == ()
        assert held.num_seqs == 1

    def test_request_without_live_sequences_is_forgotten(self):
        held = HeldRequests()
        held.add(SubmitRequest(make_request(key=10)))
        held.cancel(1, [10])
        assert held.take_all() == []

    def test_same_key_of_another_source_is_left_alone(self):
        held = HeldRequests()
        held.add(SubmitRequest(make_request(source=2, key=10)))
        assert held.cancel(1, [10]) == ()
        held.drop_source(1)
        assert held.num_seqs == 1
        held.drop_source(2)
        assert held.num_seqs == 0
