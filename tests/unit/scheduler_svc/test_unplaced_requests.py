"""Requests without a worker: kept in order, cancelled, dropped with their router."""

from scheduler_requests import make_request

from scheduler_svc.core.interface.request import BeamParams, FinishReason
from scheduler_svc.domain import SubmitRequest
from scheduler_svc.workers.placement import UnplacedRequests


class TestUnplacedRequests:
    def test_requests_come_out_in_order(self):
        unplaced = UnplacedRequests()
        commands = [SubmitRequest(make_request(key=key)) for key in (3, 1, 2)]
        for command in commands:
            unplaced.add(command)
        assert unplaced.num_seqs == 3
        assert unplaced.take_all() == commands
        assert unplaced.num_seqs == 0

    def test_one_is_taken_by_its_name_unless_it_is_gone(self):
        unplaced = UnplacedRequests()
        commands = [SubmitRequest(make_request(key=key)) for key in (3, 1)]
        for command in commands:
            unplaced.add(command)
        assert unplaced.take(1, 1) is commands[1]
        assert unplaced.take(1, 1) is None
        assert unplaced.take_all() == commands[:1]

    def test_cancel_ends_some_sequences_of_a_request(self):
        unplaced = UnplacedRequests()
        unplaced.add(SubmitRequest(make_request(key=10, n=3), was_accepted=True))
        finished = unplaced.cancel(1, [11, 12, 99])
        assert [(end.seq_key, end.reason) for end in finished] == [
            (11, FinishReason.CANCELLED),
            (12, FinishReason.CANCELLED),
        ]
        (command,) = unplaced.take_all()
        assert command.was_accepted
        assert [output.finished for output in command.request.outputs] == [False, True, True]

    def test_cancel_ends_a_search_as_a_whole(self):
        unplaced = UnplacedRequests()
        unplaced.add(SubmitRequest(make_request(key=10, n=2, beam=BeamParams(3, ()))))
        assert [end.seq_key for end in unplaced.cancel(1, [11])] == [10, 11]
        assert unplaced.take_all() == []

    def test_cancelled_sequence_does_not_end_again(self):
        unplaced = UnplacedRequests()
        unplaced.add(SubmitRequest(make_request(key=10, n=2)))
        unplaced.cancel(1, [10])
        assert unplaced.cancel(1, [10]) == ()
        assert unplaced.num_seqs == 1

    def test_request_without_live_sequences_is_forgotten(self):
        unplaced = UnplacedRequests()
        unplaced.add(SubmitRequest(make_request(key=10)))
        unplaced.cancel(1, [10])
        assert unplaced.take_all() == []

    def test_same_key_of_another_source_is_left_alone(self):
        unplaced = UnplacedRequests()
        unplaced.add(SubmitRequest(make_request(source=2, key=10)))
        assert unplaced.cancel(1, [10]) == ()
        unplaced.drop_source(1)
        assert unplaced.num_seqs == 1
        unplaced.drop_source(2)
        assert unplaced.num_seqs == 0
