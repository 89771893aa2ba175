"""What guesses a row's next tokens, for the model to verify them all in one step.

A guess costs time if it is wrong, and never changes what a row gets; see `speculation.py`.
"""

from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from contract.arrays import BoolArray, Int64Array
from contract.step import Plan
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.step.rows import Rows

Guesses: TypeAlias = list[npt.NDArray[np.int32]]
"""For each row of some, its next tokens as far as they were guessed, the first first."""


class Drafter(Protocol):
    """A way to guess."""

    @property
    def num_draft_tokens(self) -> int:
        """The most tokens that it is ever asked for; at least 1."""

    def prepare(self, step: Plan, rows: Rows) -> None:
        """Follow what a step changes; called for each, when `rows` has its changes."""

    def catch_up(self, rows: Rows, drafting: Int64Array) -> BoolArray:
        """Take in the known tokens of rows that decode, as far as a step should wait for that.

        Args:
            rows: All known tokens of `drafting` have their values there.
            drafting: int64[N], rows.

        Returns:
            bool[N]: for which of them `guess` may be called now.
        """

    def guess(
        self, rows: Rows, drafting: Int64Array, most: Int64Array, sampler: Sampler
    ) -> Guesses:
        """Guess the next tokens of rows that decode.

        Args:
            rows: As for `catch_up`.
            drafting: int64[N], rows that have been caught up with in this step.
            most: int64[N]: at most so many tokens each, in [1, num_draft_tokens]; the block table
                has room for them.
            sampler: Draws as it will when the guesses are verified.

        Returns:
            N arrays; empty where there is nothing to go by.
        """
