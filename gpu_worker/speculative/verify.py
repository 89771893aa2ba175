"""Verifies guesses: computes them along with rows' next tokens, and keeps the right ones.

In each step, a decoding row with known tokens `[0, n)` computes the last of them, at `n - 1`, and
samples the token at `n`. With k guesses for positions `[n, n + k)` the row computes k + 1 tokens,
as a short chunk, and samples a token for each of `[n, n + k]`. The token at `n` is the same as
without guesses. If this token equals its guess, the token at `n + 1` was sampled from the right
context: without guesses, the next step would have sampled it, too. The same holds for later
positions. So sampled tokens are of two kinds::

    kept      all up to and including the first that differs from its guess, or that ends the row
    dropped   the other tokens, which were sampled after tokens that the row does not have

The KV of a wrong guess stays until the token at its position is computed. This KV does no harm,
because no row reads a slot past its own known tokens, and the scheduler publishes no block with
such a slot.

Guesses do not change the output, at any temperature and however they are made. A draw depends only
on seed, position and logits (`draw.py`). So the token at a position is the same whether or not its
context was guessed. There is one exception: the last bits of logits may differ between a chunk and
a single token. If each draw used fresh random numbers, guesses would change the output. Then the
rejection rule of Leviathan et al. (Fast Inference from Transformers via Speculative Decoding, 2023)
would be needed, so that at least the probabilities of the tokens stay the same.

Rows with penalties or a grammar get no guesses, because their logits depend on every token sampled
before.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from contract.arrays import BoolArray, Int64Array
from contract.step import Plan
from contract.worker_limits import Limits
from gpu_worker import metrics
from gpu_worker.sampling.params import NO_TOKEN
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.speculative.drafter import Drafter, Guesses
from gpu_worker.speculative.lengths import DraftLengths
from gpu_worker.step.rows import Rows, ScheduledRows

_MIN_SAMPLES = 64
"""A step samples at most this many tokens, or `max_num_seqs` if that is more. The limit bounds the
memory of the logits."""


class Speculation:
    """Adds guesses to steps, and verifies the guesses.

    `extend` needs the results of all earlier steps, because guesses continue the known tokens.
    """

    def __init__(self, drafter: Drafter, limits: Limits, rows: Rows, sampler: Sampler) -> None:
        self._drafter = drafter
        self._limits = limits
        self._rows = rows
        self._sampler = sampler
        self._max_samples = max(limits.max_num_seqs, _MIN_SAMPLES)
        self._lengths = DraftLengths(limits.max_num_seqs, drafter.num_draft_tokens)
        self._is_rehearsal = False
        self._guessing_s = 0.0  # in the current step

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Within the context, let steps guess as much as blocks allow, ignoring measured costs.

        The end of the context discards what these steps measured.
        """
        self._is_rehearsal = True
        try:
            yield
        finally:
            self._is_rehearsal = False
            self._lengths = DraftLengths(self._limits.max_num_seqs, self._drafter.num_draft_tokens)

    def extend(self, plan: Plan, scheduled: ScheduledRows) -> ScheduledRows:
        """Add guesses for decoding rows: as many as `DraftLengths` chooses and the blocks allow."""
        self._guessing_s = 0.0
        self._drafter.prepare(plan, self._rows)
        if plan.new_sequences:
            self._lengths.open([new.row for new in plan.new_sequences])
        if not scheduled.num_decodes:
            return scheduled
        decoding = scheduled.rows[: scheduled.num_decodes]
        most = self._most(decoding, scheduled)
        (drafting,) = np.nonzero(most)
        if len(drafting):
            drafting = drafting[self._drafter.catch_up(self._rows, decoding[drafting])]
        if not len(drafting):
            return scheduled
        start_s = time.monotonic()
        guesses = self._drafter.guess(self._rows, decoding[drafting], most[drafting], self._sampler)
        num_guessed = np.zeros_like(decoding)
        num_guessed[drafting] = [len(guess) for guess in guesses]
        self._guessing_s = time.monotonic() - start_s
        if num_guessed.any():
            self._write(decoding[drafting], guesses)
            return _with_guesses(scheduled, num_guessed, self._rows)
        return scheduled

    def keep(
        self, scheduled: ScheduledRows, token_ids: Int64Array, is_finite: BoolArray
    ) -> BoolArray:
        """Return bool[N]: which of the sampled tokens, int64[N], the rows keep.

        A row's last kept token may come from non-finite logits. The executor then sees that the row
        has failed.
        """
        if scheduled.guesses is None:
            return np.ones(len(token_ids), np.bool_)
        ends = self._sampler.table.ends(scheduled.rows[scheduled.sampling], token_ids)
        goes_on = (token_ids == scheduled.guesses) & is_finite & ~ends  # bool[N]
        # A token is kept if its row goes on after each earlier token.
        num_breaks = np.cumsum(~goes_on) - ~goes_on  # [N]: before each token
        first = np.searchsorted(scheduled.sampling, scheduled.sampling)  # [N]: the same row's first
        kept: BoolArray = num_breaks == num_breaks[first]
        return kept

    def advance(self, scheduled: ScheduledRows, has_sampled: BoolArray, seconds: float) -> None:
        """Record how many tokens each decoding row gained; `DraftLengths` learns from the numbers.

        Args:
            scheduled: The step.
            has_sampled: bool[N], which of the sampled tokens are kept.
            seconds: Duration of the step.
        """
        num_decoding = scheduled.num_decodes + scheduled.num_drafting
        if not num_decoding:
            return
        rows = scheduled.rows[:num_decoding]
        if scheduled.guesses is None:
            num_gained = has_sampled[:num_decoding].astype(np.int64)
            self._lengths.learn_idle(rows)
        else:
            num_gained = np.bincount(scheduled.sampling[has_sampled], minlength=num_decoding)
            num_gained = num_gained[:num_decoding]
            num_guessed = scheduled.lens[:num_decoding] - 1
            num_kept = np.maximum(num_gained - 1, 0)
            self._lengths.learn_chances(rows, num_guessed, num_kept)
            metrics.SPEC_DECODE_DRAFTS.inc(scheduled.num_drafting)
            metrics.SPEC_DECODE_DRAFT_TOKENS.inc(int(num_guessed.sum()))
            metrics.SPEC_DECODE_ACCEPTED_TOKENS.inc(int(num_kept.sum()))
        self._rows.advance(rows, num_gained)
        if num_decoding == len(scheduled.rows):
            num_tokens = scheduled.num_tokens
            self._lengths.learn_costs(
                num_tokens,
                int(num_gained.sum()),
                num_tokens - num_decoding,
                seconds,
                self._guessing_s,
            )

    def _most(self, decoding: Int64Array, scheduled: ScheduledRows) -> Int64Array:
        """Return how many tokens to guess at most for each decoding row: int64[num_decodes]."""
        rows, table = self._rows, self._sampler.table
        if self._is_rehearsal:
            most = np.full(len(decoding), self._drafter.num_draft_tokens)
        else:
            most = self._lengths.choose(decoding)
        if not most.any():
            return most
        num_slots = rows.num_blocks[decoding] * self._limits.block_size
        room = np.minimum(num_slots, rows.max_total[decoding] - 1) - rows.num_tokens[decoding]
        most = np.minimum(most, room)
        most[table.has_penalties[decoding] | table.has_grammar[decoding]] = 0
        left = min(
            self._limits.max_num_batched_tokens - scheduled.num_tokens,
            self._max_samples - len(scheduled.sampling),
        )
        before = np.cumsum(most) - most
        allowed: Int64Array = np.minimum(most, np.maximum(left - before, 0))
        return allowed

    def _write(self, rows: Int64Array, guesses: Guesses) -> None:
        """Write guesses after the known tokens, so that the input batch contains them."""
        for row, start, guess in zip(
            rows.tolist(), self._rows.num_tokens[rows].tolist(), guesses, strict=True
        ):
            self._rows.token_ids[row, start : start + len(guess)] = guess


def _with_guesses(scheduled: ScheduledRows, num_guessed: Int64Array, rows: Rows) -> ScheduledRows:
    """Return `scheduled` with `num_guessed` more tokens to compute for each decoding row.

    In the returned rows, decoding rows without guesses come first.
    """
    num_decoding = scheduled.num_decodes
    order = np.argsort(num_guessed > 0, kind="stable")  # [num_decoding]
    where = np.concatenate([order, np.arange(num_decoding, len(scheduled.rows))])  # [S]
    lens = scheduled.lens.copy()
    lens[:num_decoding] += num_guessed
    lens = lens[where]
    new_rows, starts = scheduled.rows[where], scheduled.starts[where]
    # A decoding row samples at each of its tokens; other rows sample as before.
    counts = lens[:num_decoding]  # [num_decoding]; their sum is D
    decoding = np.repeat(np.arange(num_decoding), counts)  # [D]: index of each token's row
    offsets = np.arange(len(decoding)) - np.repeat(np.cumsum(counts) - counts, counts)  # [D]
    positions = starts[decoding] + 1 + offsets  # [D]: of the sampled tokens
    is_guessed = offsets + 1 < counts[decoding]
    guesses = np.where(is_guessed, rows.token_ids[new_rows[decoding], positions], NO_TOKEN)
    others = scheduled.sampling[num_decoding:]
    num_drafting = int(np.count_nonzero(num_guessed))
    return replace(
        scheduled,
        rows=new_rows,
        starts=starts,
        lens=lens,
        num_decodes=num_decoding - num_drafting,
        num_drafting=num_drafting,
        sampling=np.concatenate([decoding, others]),
        positions=np.concatenate([positions, scheduled.positions[num_decoding:]]),
        guesses=np.concatenate([guesses, np.full(len(others), NO_TOKEN)]),
        incarnations=scheduled.incarnations[where],
    )
