"""Guesses the tokens that followed an earlier occurrence of a row's last few tokens.

This works if the output repeats its prompt or itself, as code, quotations and tables do. A guess
costs a look-up, and needs no second model. Source: Saxena, Prompt Lookup Decoding, 2023.
"""

from dataclasses import dataclass, field

import numpy as np

from contract.arrays import BoolArray, Int32Array, Int64Array
from contract.step import Plan
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.speculative.drafter import Guesses
from gpu_worker.step.rows import Rows


@dataclass(slots=True)
class _Index:
    """An index of a sequence's n-grams: where each last occurred with a known token after it."""

    incarnation: int
    """`Rows.incarnation` of the sequence that is indexed."""
    num_indexed: int = 0
    """N-grams that end before this position are in `ends`."""
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Maps an n-gram, of any size, to the position after its last occurrence."""


class NgramDrafter:
    """Guesses the tokens that followed an earlier occurrence of a row's last n tokens.

    n is the greatest permitted number for which there is an earlier occurrence.
    """

    def __init__(self, num_draft_tokens: int, min_size: int, max_size: int) -> None:
        """N-grams have `min_size` to `max_size` tokens, 1 <= min_size <= max_size."""
        self._num_draft_tokens = num_draft_tokens
        self._sizes = range(max_size, min_size - 1, -1)
        self._row_to_index: dict[int, _Index] = {}

    @property
    def num_draft_tokens(self) -> int:
        return self._num_draft_tokens

    def prepare(self, plan: Plan, rows: Rows) -> None:
        """Forget released rows."""
        del rows
        for row in plan.released_rows.tolist():
            self._row_to_index.pop(row, None)

    def catch_up(self, rows: Rows, drafting: Int64Array) -> BoolArray:
        """See `Drafter`."""
        for row, end, incarnation in zip(
            drafting.tolist(),
            rows.num_tokens[drafting].tolist(),
            rows.incarnation[drafting].tolist(),
            strict=True,
        ):
            index = self._row_to_index.get(row)
            if index is None or index.incarnation != incarnation:
                index = self._row_to_index[row] = _Index(incarnation)
            self._extend(index, rows.token_ids[row, :end])
        return np.ones(len(drafting), np.bool_)

    def guess(
        self, rows: Rows, drafting: Int64Array, most: Int64Array, sampler: Sampler
    ) -> Guesses:
        """See `Drafter`."""
        del sampler  # nothing is drawn
        return [
            self._guess(self._row_to_index[row], rows.token_ids[row, :end], count)
            for row, end, count in zip(
                drafting.tolist(), rows.num_tokens[drafting].tolist(), most.tolist(), strict=True
            )
        ]

    def _guess(self, index: _Index, known: Int32Array, most: int) -> Int32Array:
        last = tuple(known[-self._sizes[0] :].tolist())
        for size in self._sizes:
            if size <= len(last) and (start := index.ends.get(last[-size:])) is not None:
                # The source may overlap the guess itself, if the pattern repeats.
                period = len(known) - start
                return known[start + np.arange(most) % period]
        return known[:0]

    def _extend(self, index: _Index, known: Int32Array) -> None:
        """Index the new n-grams that are followed by a known token."""
        end, first = len(known), index.num_indexed
        if first >= end:
            return
        tokens = known[max(0, first - self._sizes[0]) : end].tolist()
        offset = end - len(tokens)
        for size in self._sizes:
            # The n-gram that ends before position `p` begins at `p - size`.
            begin = max(first, size) - size - offset
            if begin < 0 or begin + size >= len(tokens):
                continue
            columns = (tokens[begin + i : len(tokens) - size + i] for i in range(size))
            ends = range(begin + size + offset, end)
            index.ends.update(zip(zip(*columns, strict=True), ends, strict=True))
        index.num_indexed = end
