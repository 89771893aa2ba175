"""The interface of drafters, which guess a row's next tokens; the model verifies them in one step.

A wrong guess costs time, but never changes the output (`verify.py`).
"""

from typing import Protocol, TypeAlias

from contract.arrays import BoolArray, Int32Array, Int64Array
from contract.step import Plan
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.step.rows import Rows

Guesses: TypeAlias = list[Int32Array]
"""One array for each row, in the order of the rows: the guesses for the row's next tokens."""


class Drafter(Protocol):
    @property
    def num_draft_tokens(self) -> int:
        """The largest number of tokens that `guess` returns for a row; at least 1."""

    def prepare(self, plan: Plan, rows: Rows) -> None:
        """Process the changes in a step's plan; called in each step, after `rows.apply(plan)`."""

    def catch_up(self, rows: Rows, drafting: Int64Array) -> BoolArray:
        """Process the known tokens of decoding rows, as far as the limit on a step's tokens allows.

        Args:
            rows: Has the ids of all known tokens of the rows in `drafting`.
            drafting: int64[N]: the numbers of the decoding rows.

        Returns:
            bool[N]: for each row, whether `guess` may be called in this step.
        """

    def guess(
        self, rows: Rows, drafting: Int64Array, most: Int64Array, sampler: Sampler
    ) -> Guesses:
        """Guess the next tokens of decoding rows.

        Args:
            rows: See `catch_up`.
            drafting: int64[N], rows for which `catch_up` returned true in this step.
            most: int64[N] in [1, num_draft_tokens], the largest number of guesses for each row; the
                row's block table has room for as many.
            sampler: The sampler that will verify the guesses. A draft model draws its guesses with
                this sampler, too, so that equal logits give equal tokens.

        Returns:
            N arrays; an array is empty if there is no guess for its row.
        """
