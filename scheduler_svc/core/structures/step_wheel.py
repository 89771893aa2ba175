"""What is due at a step: the reason that a steady step costs nothing for a steady sequence.

A decoding sequence gains one token in every step, so the step at which it reaches its length is
known when it starts. It is filed under that, and not looked at before.
"""

from contract.step import StepId
from scheduler_svc.core.request import SeqId
from scheduler_svc.core.sequence import Sequence


class StepWheel:
    """Sequences filed under the step at which something is due, in the order they were filed."""

    def __init__(self) -> None:
        self._due: dict[StepId, dict[SeqId, Sequence]] = {}

    def add(self, step: StepId, seq: Sequence) -> None:
        """File `seq` under `step`."""
        self._due.setdefault(step, {})[seq.seq_id] = seq

    def discard(self, step: StepId, seq: Sequence) -> None:
        """Take `seq` out from under `step`, if it is there."""
        if (due := self._due.get(step)) is not None:
            due.pop(seq.seq_id, None)

    def num_due(self, step: StepId) -> int:
        """Return how many are filed under `step`."""
        return len(self._due.get(step, ()))

    def pop(self, step: StepId) -> list[Sequence]:
        """Take out what is filed under `step`."""
        return list(self._due.pop(step, {}).values())
