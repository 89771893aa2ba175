"""The decoding sequences: when each needs its next block, and when each reaches its maximum length.

Without draft tokens, a decoding sequence gains one token in every step. So when a sequence starts
to decode, `SteadyDecodes` can compute at which steps the sequence will need its next blocks and
reach its maximum length. `SteadyDecodes` files the sequence under these steps and does no work for
it in between. With draft tokens, a step may yield several tokens for a sequence; `DraftedDecodes`
checks all sequences in every step, with array operations.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from contract.step import StepId
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.interface.request import SeqId
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.steps_in_flight import StepsInFlight


class Decodes(Protocol):
    """The interface that `RunningSet` uses to track its decoding sequences."""

    @property
    def num_next(self) -> int:
        """Number of sequences that decode in the next step."""

    def start(self, seq: Sequence, step: StepId) -> None:
        """Let `seq` decode from step `step` + 1 on; `step` computes its last known token."""

    def stop(self, seq: Sequence) -> None:
        """Remove a sequence; it must still have its row."""

    def num_due(self, step: StepId) -> int:
        """Return how many sequences need a new block of each KV group at `step`."""

    def due(self, step: StepId) -> list[Sequence]:
        """Return the sequences that need new blocks at `step`; change nothing."""

    def num_due_soon(self, step: StepId) -> int:
        """Return about how many blocks per KV group the two steps after `step` need."""

    def take_due(self, step: StepId) -> list[Sequence]:
        """Return the sequences that need blocks at `step`; the caller must give them the blocks."""

    def send(self, step: StepId) -> None:
        """Record that `step` has been sent."""

    def take_ended(self, step: StepId) -> list[Sequence]:
        """Remove and return the sequences to which the result of `step` gave their last token."""


class SteadyDecodes:
    """Decoding sequences that gain exactly one token in every step."""

    def __init__(self, config: SchedulerConfig, steps: StepsInFlight) -> None:
        self._block_size = config.block_size
        self._num_groups = len(config.kv_windows)
        self._steps = steps
        self._num_next = 0
        self._ends = StepWheel()
        self._crossing: list[dict[Sequence, StepId]] = [{} for _ in range(config.block_size)]
        """Indexed by the step modulo `block_size`: the sequences that cross a block boundary in
        that step, each with the step that samples its last token. A sequence stays at its index
        until it has no further boundary, because it crosses a boundary every `block_size` steps."""

    @property
    def num_next(self) -> int:
        return self._num_next

    def start(self, seq: Sequence, step: StepId) -> None:
        num_known = len(seq.token_ids)
        seq.last_step = StepId(step + seq.max_total_tokens - num_known - 1)
        self._ends.add(seq.last_step, seq)
        self._num_next += 1
        # Step `step + i` computes position `num_known + i - 1`.
        num_slots = len(seq.block_ids) // self._num_groups * self._block_size
        first = step + 1 + num_slots - num_known
        if first <= seq.last_step:
            self._crossing[first % self._block_size][seq] = seq.last_step

    def stop(self, seq: Sequence) -> None:
        assert seq.last_step is not None
        # When the last step was sent, `send` subtracted the sequence.
        self._num_next -= seq.last_step > self._steps.last
        self._ends.discard(seq.last_step, seq)
        # Step `last_step - i` computes position `max_total_tokens - i - 2`.
        boundary = (seq.last_step - seq.max_total_tokens + 2) % self._block_size
        self._crossing[boundary].pop(seq, None)

    def num_due(self, step: StepId) -> int:
        return len(self._crossing[step % self._block_size])

    def due(self, step: StepId) -> list[Sequence]:
        return list(self._crossing[step % self._block_size])

    def num_due_soon(self, step: StepId) -> int:
        one, two = (step + 1) % self._block_size, (step + 2) % self._block_size
        return len(self._crossing[one]) + len(self._crossing[two])

    def take_due(self, step: StepId) -> list[Sequence]:
        crossing = self._crossing[step % self._block_size]
        due, next_boundary = list(crossing), step + self._block_size
        for seq in [seq for seq, last_step in crossing.items() if last_step < next_boundary]:
            del crossing[seq]
        return due

    def send(self, step: StepId) -> None:
        self._num_next -= self._ends.num_due(step)

    def take_ended(self, step: StepId) -> list[Sequence]:
        return self._ends.pop(step)


class DraftedDecodes:
    """Decoding sequences that gain one or more tokens in every step.

    A worker that drafts verifies up to `K = num_draft_tokens` draft tokens beside each sequence's
    next token, and keeps the right ones. So a step yields 1 to K + 1 tokens for each sequence. The
    number is known only from the step's result, so sequences get blocks for all tokens that steps
    in flight may yield.

    With `n` known tokens and `f` steps in flight, a block table needs room for this many tokens::

        min(n + f * (K + 1) + K, length - 1)

    When the step being planned begins, up to `n + f * (K + 1)` tokens are known; the step adds K
    draft tokens. `length` is the sequence's maximum length; its last token is never computed.

    A table without this room gets one block per KV group in each step. One block is enough,
    because a step yields at most K + 1 tokens, and K is less than `block_size`. While a table lacks
    room for K draft tokens, the worker drafts fewer.
    """

    def __init__(self, config: SchedulerConfig, rows: Rows, steps: StepsInFlight) -> None:
        self._block_size = config.block_size
        self._num_groups = len(config.kv_windows)
        self._num_draft_tokens = config.num_draft_tokens
        self._rows = rows
        self._steps = steps
        # These arrays are indexed by row; their values are valid for rows that decode.
        self._decodes = np.zeros(config.max_num_seqs, np.bool_)
        self._num_slots = np.zeros(config.max_num_seqs, np.int64)
        self._length = np.zeros(config.max_num_seqs, np.int64)
        self._single = StepWheel()
        """Sequences that get their last token from the step that ends their prefill, so they never
        decode."""

    @property
    def num_next(self) -> int:
        """Number of sequences that decode in the next step, unless a step in flight ends them."""
        return int(np.count_nonzero(self._decodes))

    def start(self, seq: Sequence, step: StepId) -> None:
        assert seq.row is not None
        seq.last_step = None
        if len(seq.token_ids) + 1 == seq.max_total_tokens:
            seq.last_step = step
            self._single.add(step, seq)
            return
        self._decodes[seq.row] = True
        self._num_slots[seq.row] = len(seq.block_ids) // self._num_groups * self._block_size
        self._length[seq.row] = seq.max_total_tokens

    def stop(self, seq: Sequence) -> None:
        if seq.last_step is not None:
            self._single.discard(seq.last_step, seq)
        else:
            self._decodes[seq.row] = False

    def num_due(self, step: StepId) -> int:
        return int(np.count_nonzero(self._is_due(step)))

    def due(self, step: StepId) -> list[Sequence]:
        return self._owners(np.flatnonzero(self._is_due(step)))

    def num_due_soon(self, step: StepId) -> int:
        return self.num_due(StepId(step + 2))

    def take_due(self, step: StepId) -> list[Sequence]:
        due = np.flatnonzero(self._is_due(step))
        self._num_slots[due] += self._block_size
        return self._owners(due)

    def send(self, step: StepId) -> None:
        """Do nothing: `num_next` counts the sequences at each call, so no count is kept."""

    def take_ended(self, step: StepId) -> list[Sequence]:
        has_ended = self._decodes & (self._rows.num_tokens_by_row >= self._length)
        return self._single.pop(step) + self._owners(np.flatnonzero(has_ended))

    def _is_due(self, step: StepId) -> npt.NDArray[np.bool_]:
        """Return bool[max_num_seqs]: whether each row needs a block at `step`."""
        num_unknown = step - 1 - self._steps.last_answered
        num_drafts = self._num_draft_tokens
        reach = self._rows.num_tokens_by_row + num_unknown * (num_drafts + 1) + num_drafts
        due: npt.NDArray[np.bool_] = self._num_slots < np.minimum(reach, self._length - 1)
        return self._decodes & due

    def _owners(self, rows: npt.NDArray[np.intp]) -> list[Sequence]:
        return [seq for seq in map(self._rows.owner, rows.tolist()) if seq is not None]


class StepWheel:
    """Sequences filed under the step at which they are due, in the order of their addition."""

    def __init__(self) -> None:
        self._due: dict[StepId, dict[SeqId, Sequence]] = {}

    def add(self, step: StepId, seq: Sequence) -> None:
        self._due.setdefault(step, {})[seq.seq_id] = seq

    def discard(self, step: StepId, seq: Sequence) -> None:
        """Remove `seq` if it is filed under `step`."""
        if (due := self._due.get(step)) is not None:
            due.pop(seq.seq_id, None)

    def num_due(self, step: StepId) -> int:
        """Return how many sequences are due at `step`."""
        return len(self._due.get(step, ()))

    def pop(self, step: StepId) -> list[Sequence]:
        """Remove and return the sequences that are due at `step`."""
        return list(self._due.pop(step, {}).values())
