"""Whether a request gained anything at a worker that was lost, read from the plans."""

from dataclasses import replace

import numpy as np
from scheduler_requests import make_request

from contract.step import NewSequence, Plan
from scheduler_svc.core.beams.search import BeamParams
from scheduler_svc.core.request import OutputSoFar
from scheduler_svc.workers.progress import Progress, SequencesAtWorker


class TestProgress:
    @staticmethod
    def plan(*new_sequences, released=()):
        released = np.array(released, np.int32)
        return Plan(1, 0, released, new_sequences)

    @staticmethod
    def sequence(row, known, sampling=b"s", output_index=0):
        tokens = np.array(known, np.int32)
        return NewSequence(1, row, tokens, 2, 0, tokens, sampling, 7, output_index)

    @staticmethod
    def request(*outputs, sampling=b"s"):
        so_far = tuple(
            OutputSoFar(np.array(tokens, np.int32), finished=False) for tokens in outputs
        )
        return replace(make_request(n=len(outputs), outputs=so_far), sampling=sampling)

    def test_one_without_a_row_has_waited(self):
        at_worker = SequencesAtWorker()
        at_worker.sent(self.plan(self.sequence(0, [1, 2]), self.sequence(1, [1, 3])))
        at_worker.sent(self.plan(released=[0]))
        assert at_worker.find(self.request([])) is Progress.WAITED
        at_worker.sent(self.plan(self.sequence(0, [1, 2], sampling=b"other")))
        assert at_worker.find(self.request([])) is Progress.WAITED

    def test_what_counts_is_what_it_gained_since_it_got_its_row(self):
        at_worker = SequencesAtWorker()
        at_worker.sent(self.plan(self.sequence(0, [1, 2, 8, 9])))
        assert at_worker.find(self.request([8, 9])) is Progress.NONE
        assert at_worker.find(self.request([8, 9, 7])) is Progress.SOME

    def test_one_output_that_gains_is_enough(self):
        at_worker = SequencesAtWorker()
        rows = self.sequence(0, [1, 2]), self.sequence(1, [1, 2], output_index=1)
        at_worker.sent(self.plan(*rows))
        assert at_worker.find(self.request([], [])) is Progress.NONE
        assert at_worker.find(self.request([], [5])) is Progress.SOME

    def test_a_search_gains_when_one_of_its_beams_is_longer_than_the_prompt(self):
        at_worker, request = SequencesAtWorker(), self.request([])
        request = replace(request, beam=BeamParams(2, ()))
        at_worker.sent(self.plan(self.sequence(0, [1, 2])))
        assert at_worker.find(request) is Progress.NONE
        at_worker.sent(self.plan(self.sequence(1, [1, 2, 5], output_index=1), released=[0]))
        assert at_worker.find(request) is Progress.SOME
