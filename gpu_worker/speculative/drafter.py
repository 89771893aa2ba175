"""The interface of drafters: they guess a row's next tokens, for the model to verify in one step.

A wrong guess costs time, and never changes the output; see `verify.py`.
"""

from typing import Protocol, TypeAlias

from contract.arrays import BoolArray, Int32Array, Int64Array
from contract.step import Plan
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.step.rows import Rows

Guesses: TypeAlias = list[Int32Array]
"""The guessed next tokens of each row, in order."""


class Drafter(Protocol):
    @property
    def num_draft_tokens(self) -> int:
        """Most tokens that it is asked for at once; at least 1."""

    def prepare(self, plan: Plan, rows: Rows) -> None:
        """Follow a step's changes. Called for each step, after they were applied to `rows`."""

    def catch_up(self, rows: Rows, drafting: Int64Array) -> BoolArray:
        """Catch up with the known tokens of decoding rows, as far as fits this step.

        Args:
            rows: Has the values of all known tokens of `drafting`.
            drafting: int64[N], rows.

        Returns:
            bool[N]: whether `guess` may be called now, for each row.
        """

    def guess(
        self, rows: Rows, drafting: Int64Array, most: Int64Array, sampler: Sampler
    ) -> Guesses:
        """Guess the next tokens of decoding rows.

        Args:
            rows: As for `catch_up`.
            drafting: int64[N], rows for which `catch_up` returned true in this step.
            most: int64[N] in [1, num_draft_tokens], the most tokens for each; the block table has
                room for them.
            sampler: Draws exactly as it will when the guesses are verified.

        Returns:
            N arrays; empty where it has no guess.
        """
