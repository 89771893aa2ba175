"""Which account each row's sequence is of, as numbers, so that a step is counted as an array."""

from collections.abc import Iterator

import numpy as np

from contract.arrays import Int32Array


class RowAccounts:
    """Numbers the accounts that have a row; a number is used again when its account has none."""

    def __init__(self, max_num_seqs: int) -> None:
        self._row_to_number = np.zeros(max_num_seqs, np.intp)
        self._account_to_number: dict[str, int] = {}
        self._names = [""] * max_num_seqs  # by number, as the next two
        self._num_rows = [0] * max_num_seqs
        self._free = list(reversed(range(max_num_seqs)))

    def open(self, row: int, account: str) -> None:
        """Note whose sequence a row is given to."""
        number = self._account_to_number.get(account)
        if number is None:
            number = self._account_to_number[account] = self._free.pop()
            self._names[number] = account
        self._num_rows[number] += 1
        self._row_to_number[row] = number

    def close(self, row: int) -> None:
        """Note that its sequence is gone."""
        number = int(self._row_to_number[row])
        self._num_rows[number] -= 1
        if self._num_rows[number] == 0:
            del self._account_to_number[self._names[number]]
            self._free.append(number)

    def count(self, rows: Int32Array) -> Iterator[tuple[str, int]]:
        """Yield each account that `rows`, which all have sequences, are of, and how many are."""
        counts = np.bincount(self._row_to_number[rows])
        for number in np.flatnonzero(counts).tolist():
            yield self._names[number], int(counts[number])
