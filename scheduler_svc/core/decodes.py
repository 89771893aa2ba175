"""The sequences that decode: when each needs a block, and when it has reached its length.

A sequence that gains one token in every step is filed under the steps at which that will be so, and
not looked at before. If a step may bring several tokens it is another class, `DraftedDecodes`.
"""

from typing import Protocol

from contract.step import StepId
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.steps_in_flight import StepsInFlight
from scheduler_svc.core.structures.step_wheel import StepWheel


class Decodes(Protocol):
    """What `RunningSet` asks of those that decode."""

    @property
    def num_next(self) -> int:
        """How many compute in the next step."""

    def start(self, seq: Sequence, step: StepId) -> None:
        """Let `seq`, whose last known token `step` computes, decode from then on."""

    def stop(self, seq: Sequence) -> None:
        """Forget a sequence, which still has its row."""

    def num_due(self, step: StepId) -> int:
        """Return how many need a block at `step`."""

    def num_due_soon(self, step: StepId) -> int:
        """Return how many blocks the two steps after `step` may need beyond that."""

    def take_due(self, step: StepId) -> list[Sequence]:
        """Return those that need a block at `step`, which each of them gets."""

    def send(self, step: StepId) -> None:
        """Note that `step` goes out."""

    def take_ended(self, step: StepId) -> list[Sequence]:
        """Return those that have their last token, now that the result of `step` is applied."""


class SteadyDecodes:
    """Sequences that gain one token in every step."""

    def __init__(self, config: SchedulerConfig, steps: StepsInFlight) -> None:
        self._block_size = config.block_size
        self._steps = steps
        self._num_next = 0
        self._ends = StepWheel()
        self._crossing: list[dict[Sequence, StepId]] = [{} for _ in range(config.block_size)]
        """By step, modulo the block size: those that cross a border then, with their last steps. A
        sequence is filed once: its next border is a block's steps away, until it ends before."""

    @property
    def num_next(self) -> int:
        """How many compute in the next step."""
        return self._num_next

    def start(self, seq: Sequence, step: StepId) -> None:
        """Let `seq`, whose last known token `step` computes, decode from then on."""
        num_known = len(seq.token_ids)
        seq.last_step = StepId(step + seq.max_total_tokens - num_known - 1)
        self._ends.add(seq.last_step, seq)
        self._num_next += 1
        # Step `step + i` computes position `num_known + i - 1`.
        first = step + 1 + len(seq.block_ids) * self._block_size - num_known
        if first <= seq.last_step:
            self._crossing[first % self._block_size][seq] = seq.last_step

    def stop(self, seq: Sequence) -> None:
        """Forget a sequence, which still has its row."""
        assert seq.last_step is not None
        self._num_next -= seq.last_step > self._steps.last
        self._ends.discard(seq.last_step, seq)
        # Step `last_step - i` computes position `max_total_tokens - i - 2`.
        border = (seq.last_step - seq.max_total_tokens + 2) % self._block_size
        self._crossing[border].pop(seq, None)

    def num_due(self, step: StepId) -> int:
        """Return how many need a block at `step`."""
        return len(self._crossing[step % self._block_size])

    def num_due_soon(self, step: StepId) -> int:
        """Return how many blocks the two steps after `step` need."""
        return self.num_due(StepId(step + 1)) + self.num_due(StepId(step + 2))

    def take_due(self, step: StepId) -> list[Sequence]:
        """Return those that need a block at `step`, which each of them gets."""
        crossing = self._crossing[step % self._block_size]
        due, next_border = list(crossing), step + self._block_size
        for seq in [seq for seq, last_step in crossing.items() if last_step < next_border]:
            del crossing[seq]
        return due

    def send(self, step: StepId) -> None:
        """Note that `step` goes out."""
        self._num_next -= self._ends.num_due(step)

    def take_ended(self, step: StepId) -> list[Sequence]:
        """Return those whose last token `step` sampled."""
        return self._ends.pop(step)
