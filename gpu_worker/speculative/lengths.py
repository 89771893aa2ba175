"""Chooses how many tokens to guess for each row, by probability and cost.

A guess that is kept gains one token. A guess takes time, in which the batch could have gained
other tokens: these tokens are the guess's cost. So a guess is made if the chance that it is kept
exceeds its cost. Chances and costs are learned from past steps. A guess takes `d` seconds to make.
A step of `T` tokens takes about `a + b T` seconds, so verifying a guess takes `b` seconds more. If
all rows together gain `r` tokens per second, a guess costs `r (b + d)` tokens. Let `p` be the
chance that a row's next guess is kept. The row's j-th guess is kept only if all guesses before it
are kept, so the chance of the j-th guess is about `p^j`. The row gets k guesses, where k is the
largest number with::

    p^k >= r (b + d)

A small batch leaves most of the device unused: `a` is most of a step, and even poor guesses save
time. In a large batch `b T` is most of a step. Without guesses such a step gains about `T` tokens
in `b T` seconds, so `r` is about `1 / b`, and a guess would cost at least about one token. So
nothing is guessed. A row whose guesses fail gets no guesses either; because old observations fade,
the row is tried again later. One step in 32 does the opposite: it guesses although no guess pays,
or does not guess although guesses pay. So the costs of steps with and without guesses stay known.
"""

import math
from dataclasses import dataclass

import numpy as np

from contract.arrays import Int64Array

_ROW_MEMORY = 0.9
"""The factor by which a step that guesses for a row reduces the weight of the row's old guesses."""
_IDLE_MEMORY = 0.98
"""The factor by which a step without a guess for a row reduces the weight of the row's old
guesses."""
_STEP_MEMORY = 0.99
"""The factor by which each step reduces the weight of older steps in the measured costs."""
_TRIAL_STEPS = 32
"""One step in this many does the opposite of what pays: it does not guess where guesses pay, or
guesses where they do not."""
_MAX_SLOWNESS = 3.0
"""A measured duration is capped at this many times the mean: something else delayed a step that
took longer."""
_PRIOR_TRIED, _PRIOR_KEPT = 2.0, 1.4
"""A row begins as if this many guesses had been tried, and this many of them kept."""
_MAX_CHANCE = 0.999
_MIN_SPREAD = 1e-3
"""The line `a + b T` is fitted only if the variance of `T`, divided by the squared mean of `T`,
exceeds this value."""


class DraftLengths:
    """Chooses the number of guesses for each row of a worker, and learns from each step."""

    def __init__(self, max_num_seqs: int, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens
        # float64[2, max_num_seqs]: guesses tried and kept, fading, without the prior.
        self._seen = np.zeros((2, max_num_seqs))
        self._steps = _StepCosts()
        self._num_choices = 0

    def open(self, rows: list[int]) -> None:
        """Forget what was learned about rows, because they have new sequences."""
        self._seen[:, rows] = 0

    def choose(self, rows: Int64Array) -> Int64Array:
        """Return int64[N]: how many tokens to guess for each of `rows`, int64[N].

        Called once per step.
        """
        self._num_choices += 1
        cost = self.cost
        pays, is_trial = cost < 1, self._num_choices % _TRIAL_STEPS == 1
        if pays == is_trial:
            return np.zeros(len(rows), np.int64)
        if is_trial or cost <= 0:
            return np.full(len(rows), self._num_draft_tokens)
        tried, kept = self._seen[:, rows]
        chance = np.minimum((kept + _PRIOR_KEPT) / (tried + _PRIOR_TRIED), _MAX_CHANCE)
        longest: Int64Array = (math.log(cost) / np.log(chance)).astype(np.int64)
        return np.minimum(longest, self._num_draft_tokens)

    @property
    def cost(self) -> float:
        """The cost of a guess, in tokens that the batch could have gained; 0 if unknown."""
        steps = self._steps
        return steps.tokens_per_s * (steps.token_s + steps.guess_s)

    def learn_idle(self, rows: Int64Array) -> None:
        """Let old guesses of some rows count less, after a step that made no guesses for them.

        `rows` is int64[N].
        """
        self._seen[:, rows] *= _IDLE_MEMORY

    def learn_chances(
        self, rows: Int64Array, num_guessed: Int64Array, num_kept: Int64Array
    ) -> None:
        """Learn how many guesses were made and kept for each of `rows`; all arrays are int64[N]."""
        # Guesses after a wrong one give no information.
        num_tried = np.minimum(num_kept + 1, num_guessed)
        memory = np.where(num_guessed > 0, _ROW_MEMORY, _IDLE_MEMORY)
        self._seen[:, rows] = self._seen[:, rows] * memory + (num_tried, num_kept)

    def learn_costs(
        self, num_tokens: int, num_gained: int, num_guessed: int, seconds: float, guessing_s: float
    ) -> None:
        """Learn from a step that computed only decodes and guesses.

        Args:
            num_tokens: Tokens computed.
            num_gained: Tokens that rows gained.
            num_guessed: Tokens that were guesses.
            seconds: Duration of the step.
            guessing_s: Part of `seconds` that was spent on guessing.
        """
        self._steps.add(num_tokens, num_gained, num_guessed, seconds, guessing_s)


@dataclass(slots=True)
class _StepCosts:
    """Sums over steps, in which older steps weigh less, and costs that follow from the sums."""

    weight: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0
    """Sum of squares of tokens per step."""
    seconds: float = 0.0
    """Sum of seconds, without guessing."""
    products: float = 0.0
    """Sum of tokens times seconds."""
    gained: float = 0.0
    """Tokens that rows gained."""
    guessed: float = 0.0
    guessing: float = 0.0
    """Seconds of guessing."""
    total: float = 0.0
    """Seconds, with guessing."""

    def add(
        self, num_tokens: int, num_gained: int, num_guessed: int, seconds: float, guessing_s: float
    ) -> None:
        """Add a step; see `DraftLengths.learn_costs`."""
        computing_s = seconds - guessing_s
        if self.weight > 1:
            computing_s = min(computing_s, _MAX_SLOWNESS * self.seconds / self.weight)
        self.weight = self.weight * _STEP_MEMORY + 1
        self.tokens = self.tokens * _STEP_MEMORY + num_tokens
        self.squares = self.squares * _STEP_MEMORY + num_tokens * num_tokens
        self.seconds = self.seconds * _STEP_MEMORY + computing_s
        self.products = self.products * _STEP_MEMORY + num_tokens * computing_s
        self.gained = self.gained * _STEP_MEMORY + num_gained
        if num_guessed:  # otherwise keep the last estimate
            self.guessed = self.guessed * _STEP_MEMORY + num_guessed
            self.guessing = self.guessing * _STEP_MEMORY + guessing_s
        self.total = self.total * _STEP_MEMORY + computing_s + guessing_s

    @property
    def tokens_per_s(self) -> float:
        """Rate at which rows gain tokens."""
        return self.gained / self.total if self.total else 0.0

    @property
    def guess_s(self) -> float:
        """Seconds to guess a token."""
        return self.guessing / self.guessed if self.guessed else 0.0

    @property
    def token_s(self) -> float:
        """Seconds that one more token adds to a step; 0 if all steps had about as many tokens."""
        spread = self.weight * self.squares - self.tokens * self.tokens
        if spread <= _MIN_SPREAD * self.tokens * self.tokens:
            return 0.0
        return max(0.0, (self.weight * self.products - self.tokens * self.seconds) / spread)
