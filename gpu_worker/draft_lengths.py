"""How many tokens to guess for each row: as many as are worth their computation.

A guess is worth it if the chance that it is kept is greater than what it costs, in units of what a
token costs otherwise. Both are learned from the steps. A step of `T` tokens takes about `a + b T`
seconds; if tokens come at a rate `r`, one that is computed in vain costs `r (b + d)` tokens, where
`d` is what guessing it took. A row's guess at distance j is kept with a chance of about `p^j`, so
that the row gets the largest k with::

    p^k >= r (b + d)

A small batch leaves much of the device unused: `a` is most of a step, and even poor guesses pay. In
a large one, `r b` comes near 1, and nothing is guessed. Rows whose guesses fail get none, either;
since what is not tried is forgotten, they are tried again.
"""

import numpy as np

from gpu_worker.step import Int64Array

_ROW_MEMORY = 0.9
"""What remains of a row's old guesses in its chance, with each step that brings new ones."""
_IDLE_MEMORY = 0.98
"""The same, with each step without guesses."""
_STEP_MEMORY = 0.98
"""What remains of old steps in what a step costs."""
_PRIOR_TRIED, _PRIOR_KEPT = 2.0, 1.4
"""What a row's chance is before there is anything to go by, as if so many had been kept."""
_MAX_COST = 0.95
"""However dear guesses are, one that is all but sure is made, so that costs are learned again."""


class DraftLengths:
    """Learns from each step; one for all rows."""

    def __init__(self, max_num_seqs: int, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._tried = np.full(max_num_seqs, _PRIOR_TRIED)
        self._kept = np.full(max_num_seqs, _PRIOR_KEPT)
        # Sums over the steps, the older the less, of weight, T, T^2, seconds, T * seconds.
        self._sums = np.zeros(5)
        self._num_gained = 0.0  # tokens that rows got, in the same steps
        self._guess_s = self._num_guessed = 0.0

    def open(self, rows: Int64Array) -> None:
        """Let rows begin anew: they have other sequences."""
        self._tried[rows], self._kept[rows] = _PRIOR_TRIED, _PRIOR_KEPT

    def choose(self, rows: Int64Array) -> Int64Array:
        """int64[N]: how many tokens to guess for each of `rows`, int64[N]."""
        chance = self._kept[rows] / self._tried[rows]
        cost = min(self.cost, _MAX_COST)
        if cost <= 0:
            return np.full(len(rows), self._num_draft_tokens)
        longest = np.log(cost) / np.log(np.clip(chance, 1e-3, 0.999))
        lengths: Int64Array = np.minimum(longest, self._num_draft_tokens).astype(np.int64)
        return lengths

    @property
    def cost(self) -> float:
        """What a guess costs that is not kept, in tokens; 0 if nothing is known yet."""
        weight, tokens, squares, seconds, products = self._sums.tolist()
        spread = weight * squares - tokens * tokens
        if spread <= 1e-3 * tokens * tokens:  # all steps were alike
            token_s = 0.0
        else:
            token_s = max(0.0, (weight * products - tokens * seconds) / spread)
        guess_s = self._guess_s / self._num_guessed if self._num_guessed else 0.0
        return self._num_gained / seconds * (token_s + guess_s) if seconds else 0.0

    def learn_chances(
        self, rows: Int64Array, num_guessed: Int64Array, num_kept: Int64Array
    ) -> None:
        """Learn how many guesses were kept, of how many, int64[N] each; the rest was not tried."""
        memory = np.where(num_guessed > 0, _ROW_MEMORY, _IDLE_MEMORY)
        num_tried = np.minimum(num_kept + 1, num_guessed)  # those behind a wrong one say nothing
        for sums, prior, new in (
            (self._tried, _PRIOR_TRIED, num_tried),
            (self._kept, _PRIOR_KEPT, num_kept),
        ):
            sums[rows] = prior + memory * (sums[rows] - prior) + new

    def learn_cost(self, num_tokens: int, num_gained: int, seconds: float) -> None:
        """Learn what a step took that computed decodes and guesses and nothing else."""
        seen = [1.0, num_tokens, num_tokens * num_tokens, seconds, num_tokens * seconds]
        self._sums = self._sums * _STEP_MEMORY + seen
        self._num_gained = self._num_gained * _STEP_MEMORY + num_gained

    def learn_guess_cost(self, num_guessed: int, seconds: float) -> None:
        """Learn what guessing took."""
        self._guess_s = self._guess_s * _STEP_MEMORY + seconds
        self._num_guessed = self._num_guessed * _STEP_MEMORY + num_guessed
