"""The sequences that decode, where a step brings each of them one token or several.

A worker that drafts verifies up to `K = num_draft_tokens` guesses with each sequence's next token,
and keeps those that were right: a step brings 1 to K + 1 tokens. How many is known with its result,
so blocks are given for what the steps in flight may bring at most. With `n` known tokens and `f`
steps in flight, a table has room, or is on its way to it by one block in each step, for::

    min(n + f * (K + 1) + K, length - 1)

tokens: those that may be known when the step computes, the last of which it computes first, and its
guesses. The last token of all is not computed. Since K is less than a block, one block per step is
enough for one token per step at least; a worker guesses no more than the table has room for.

All are looked at in each step, as arrays.
"""

import numpy as np
import numpy.typing as npt

from contract.step import StepId
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.steps_in_flight import StepsInFlight
from scheduler_svc.core.structures.step_wheel import StepWheel


class DraftedDecodes:
    """Sequences that gain at least one token in every step; see `Decodes` for the methods."""

    def __init__(self, config: SchedulerConfig, rows: Rows, steps: StepsInFlight) -> None:
        self._block_size = config.block_size
        self._num_draft_tokens = config.num_draft_tokens
        self._rows = rows
        self._steps = steps
        # By row, valid for those that decode.
        self._decodes = np.zeros(config.max_num_seqs, np.bool_)
        self._num_slots = np.zeros(config.max_num_seqs, np.int64)
        self._length = np.zeros(config.max_num_seqs, np.int64)
        self._single = StepWheel()
        """Those that get one token and end: they decode in no step."""

    @property
    def num_next(self) -> int:
        """How many compute in the next step; those that have ended unheard are among them."""
        return int(np.count_nonzero(self._decodes))

    def start(self, seq: Sequence, step: StepId) -> None:
        """Let `seq`, whose last known token `step` computes, decode from then on."""
        assert seq.row is not None
        seq.last_step = None
        if len(seq.token_ids) + 1 == seq.max_total_tokens:
            seq.last_step = step
            self._single.add(step, seq)
            return
        self._decodes[seq.row] = True
        self._num_slots[seq.row] = len(seq.block_ids) * self._block_size
        self._length[seq.row] = seq.max_total_tokens

    def stop(self, seq: Sequence) -> None:
        """Forget a sequence, which still has its row."""
        if seq.last_step is not None:
            self._single.discard(seq.last_step, seq)
        else:
            self._decodes[seq.row] = False

    def num_due(self, step: StepId) -> int:
        """Return how many need a block at `step`."""
        return int(np.count_nonzero(self._is_due(step)))

    def num_due_soon(self, step: StepId) -> int:
        """Return how many blocks the two steps after `step` may need, as far as one can tell."""
        return self.num_due(StepId(step + 2))

    def take_due(self, step: StepId) -> list[Sequence]:
        """Return those that need a block at `step`, which each of them gets."""
        due = np.flatnonzero(self._is_due(step))
        self._num_slots[due] += self._block_size
        return self._owners(due)

    def send(self, step: StepId) -> None:
        """Note that `step` goes out."""

    def take_ended(self, step: StepId) -> list[Sequence]:
        """Return those that have their last token, now that the result of `step` is applied."""
        has_ended = self._decodes & (self._rows.num_tokens_by_row >= self._length)
        return self._single.pop(step) + self._owners(np.flatnonzero(has_ended))

    def _is_due(self, step: StepId) -> npt.NDArray[np.bool_]:
        """bool[max_num_seqs]."""
        num_unknown = step - 1 - self._steps.last_answered
        num_drafts = self._num_draft_tokens
        reach = self._rows.num_tokens_by_row + num_unknown * (num_drafts + 1) + num_drafts
        due: npt.NDArray[np.bool_] = self._num_slots < np.minimum(reach, self._length - 1)
        return self._decodes & due

    def _owners(self, rows: npt.NDArray[np.intp]) -> list[Sequence]:
        return [seq for seq in map(self._rows.owner, rows.tolist()) if seq is not None]
