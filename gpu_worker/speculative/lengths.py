"""How many tokens to guess for each row: as many as are worth their computation.

A guess is worth it if the chance that it is kept is greater than what it costs, in units of what a
token costs otherwise. Both are learned from the steps. A step of `T` tokens takes about `a + b T`
seconds; if tokens come at a rate `r`, one that is computed in vain costs `r (b + d)` tokens, where
`d` is what guessing it took. A row's guess at distance j is kept with a chance of about `p^j`, so
that the row gets the largest k with::

    p^k >= r (b + d)

A small batch leaves much of the device unused: `a` is most of a step, and even poor guesses pay. In
a large one `r b` comes near 1, and nothing is guessed. Rows whose guesses fail get none, either;
since what is not tried is forgotten, they are tried again. And in one step of many the opposite is
done of what seems to pay, guess or not, so that the costs of both stay known.
"""

import math
from dataclasses import dataclass

import numpy as np

from contract.arrays import Int64Array

_ROW_MEMORY = 0.9
"""What remains of a row's old guesses in its chance, with each step that brings new ones."""
_IDLE_MEMORY = 0.98
"""The same, with each step without guesses."""
_STEP_MEMORY = 0.99
"""What remains of old steps in what a step costs."""
_TRIAL_STEPS = 32
"""One step in so many tries the opposite of what seems to pay."""
_MAX_SLOWNESS = 3.0
"""A step that takes longer than so many others counts as that long: something else was at work."""
_PRIOR_TRIED, _PRIOR_KEPT = 2.0, 1.4
"""What a row's chance is before there is anything to go by, as if so many had been kept."""
_MAX_CHANCE = 0.999
_MIN_SPREAD = 1e-3
"""How much the numbers of tokens must vary to tell, as a share of their mean, squared."""


class DraftLengths:
    """Learns from each step; one for all rows."""

    def __init__(self, max_num_seqs: int, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens
        # float64[2, max_num_seqs]: guesses tried and kept, the older the less, beside the prior.
        self._seen = np.zeros((2, max_num_seqs))
        self._steps = _StepCosts()
        self._num_choices = 0

    def open(self, rows: list[int]) -> None:
        """Let rows begin anew: they have other sequences."""
        self._seen[:, rows] = 0

    def choose(self, rows: Int64Array) -> Int64Array:
        """int64[N]: how many tokens to guess for each of `rows`, int64[N]; once a step."""
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
        """What a guess costs that is not kept, in tokens; 0 if nothing is known yet."""
        steps = self._steps
        return steps.tokens_per_s * (steps.token_s + steps.guess_s)

    def learn_idle(self, rows: Int64Array) -> None:
        """Learn that nothing was guessed for any of `rows`, int64[N]."""
        self._seen[:, rows] *= _IDLE_MEMORY

    def learn_chances(
        self, rows: Int64Array, num_guessed: Int64Array, num_kept: Int64Array
    ) -> None:
        """Learn how many guesses were kept, of how many, int64[N] each."""
        num_tried = np.minimum(num_kept + 1, num_guessed)  # those behind a wrong one say nothing
        memory = np.where(num_guessed > 0, _ROW_MEMORY, _IDLE_MEMORY)
        self._seen[:, rows] = self._seen[:, rows] * memory + (num_tried, num_kept)

    def learn_costs(
        self, num_tokens: int, num_gained: int, num_guessed: int, seconds: float, guessing_s: float
    ) -> None:
        """Learn of a step that computed decodes and guesses and nothing else.

        Args:
            num_tokens: What it computed.
            num_gained: What its rows got of that.
            num_guessed: How many of the tokens were guesses.
            seconds: What it took in all.
            guessing_s: What it took of that to guess.
        """
        self._steps.add(num_tokens, num_gained, num_guessed, seconds, guessing_s)


@dataclass(slots=True)
class _StepCosts:
    """Sums over the steps, the older the less, and the line through their times."""

    weight: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0
    """Of the numbers of tokens."""
    seconds: float = 0.0
    """Without guessing."""
    products: float = 0.0
    """Of tokens and seconds."""
    gained: float = 0.0
    """Tokens that rows got."""
    guessed: float = 0.0
    guessing: float = 0.0
    """Seconds."""
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
        if num_guessed:  # else what is known stays known
            self.guessed = self.guessed * _STEP_MEMORY + num_guessed
            self.guessing = self.guessing * _STEP_MEMORY + guessing_s
        self.total = self.total * _STEP_MEMORY + computing_s + guessing_s

    @property
    def tokens_per_s(self) -> float:
        """How fast rows get tokens."""
        return self.gained / self.total if self.total else 0.0

    @property
    def guess_s(self) -> float:
        """What it takes to guess a token."""
        return self.guessing / self.guessed if self.guessed else 0.0

    @property
    def token_s(self) -> float:
        """What one token more adds to a step, by least squares; 0 if all steps were alike."""
        spread = self.weight * self.squares - self.tokens * self.tokens
        if spread <= _MIN_SPREAD * self.tokens * self.tokens:
            return 0.0
        return max(0.0, (self.weight * self.products - self.tokens * self.seconds) / spread)
