"""The running sequences as arrays, by row: what a step's result changes for all of them at once."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from contract.arrays import Int32Array
from scheduler_svc.core.sequence import Sequence


class Rows:
    """One row for each running sequence; the same numbers as the worker's.

    A row outlives its sequence until no step in flight names it: its owner is None, results for it
    are ignored, and it is not free.
    """

    def __init__(
        self, max_num_seqs: int, max_len: int, block_size: int, num_draft_tokens: int = 0
    ) -> None:
        """A step brings a row at most `num_draft_tokens` + 1 tokens."""
        self.max_num_seqs = max_num_seqs
        self._may_repeat = num_draft_tokens > 0
        self._owner: list[Sequence | None] = [None] * max_num_seqs
        self._free = list(reversed(range(max_num_seqs)))
        # calloc'd: pages that no sequence reaches are never touched
        width = -(-max_len // block_size) * block_size
        self._tokens = np.zeros((max_num_seqs, width), "<i4")
        self._blocks = self._tokens.view(f"V{4 * block_size}")  # opaque: each reads as `bytes`
        self._num_tokens = np.zeros(max_num_seqs, np.int32)
        self._alive = np.zeros(max_num_seqs, np.bool_)
        self._source = np.zeros(max_num_seqs, np.int32)
        self._seq_key = np.zeros(max_num_seqs, np.uint64)
        self.accounts = RowAccounts(max_num_seqs)
        self.num_reserved = 0
        """Free rows that are kept for beams, as `BeamGroups` counts them, or to be claimed."""

    @property
    def num_free(self) -> int:
        """Rows that `occupy` can give to anyone."""
        return len(self._free) - self.num_reserved

    @property
    def free(self) -> tuple[int, ...]:
        """The free rows, reserved ones included."""
        return tuple(self._free)

    def occupy(self, seq: Sequence) -> int:
        """Give a free row to `seq`, which brings its known tokens; return it."""
        row = self._free.pop()
        self._owner[row] = seq
        self.set_tokens(row, seq.token_ids)
        self._source[row] = seq.request.source
        self._seq_key[row] = seq.seq_key
        self._alive[row] = seq.group is None  # which token a beam gets its search decides
        self.accounts.open(row, seq.rank.account)
        return row

    def set_tokens(self, row: int, token_ids: Int32Array) -> None:
        """Make these the known tokens of a row."""
        self._tokens[row, : len(token_ids)] = token_ids
        self._num_tokens[row] = len(token_ids)

    def abandon(self, row: int) -> None:
        """End the ownership of a row; it is not free before `give_back`."""
        self._owner[row] = None
        self._alive[row] = False
        self.accounts.close(row)

    def give_back(self, row: int) -> None:
        """Make an abandoned row free."""
        self._free.append(row)

    def owner(self, row: int) -> Sequence | None:
        """Return the sequence that owns the row."""
        return self._owner[row]

    @property
    def num_tokens_by_row(self) -> Int32Array:
        """int32[max_num_seqs], not to be changed: how many known tokens each row has."""
        return self._num_tokens

    def num_tokens(self, row: int) -> int:
        """Return the number of known tokens."""
        return int(self._num_tokens[row])

    def tokens(self, row: int) -> Int32Array:
        """Return int32[num_tokens], a view of the known tokens."""
        return self._tokens[row, : self._num_tokens[row]]

    def known_tokens(self, seq: Sequence) -> Int32Array:
        """Return int32[N], a copy of a sequence's known tokens, whether it runs or not."""
        return (seq.token_ids if seq.row is None else self.tokens(seq.row)).copy()

    def read_blocks(self, rows: list[int], indices: list[int]) -> list[bytes]:
        """Return one full block of known tokens of each row, as little-endian int32."""
        data: list[bytes] = self._blocks[rows, indices].tolist()
        return data

    def append(
        self, rows: Int32Array, token_ids: Int32Array
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint64], Int32Array, Int32Array]:
        """Append one token to each of the distinct `rows` that has an owner.

        With draft tokens a row may be repeated, without other rows in between.

        Returns:
            Sources, sequence keys, token ids, and indices into `rows`, of those that have an owner.
        """
        live, tokens = rows.astype(np.intp), token_ids  # intp: else each access converts it
        index = np.flatnonzero(self._alive.take(live))
        if len(index) < len(rows):
            live, tokens = live.take(index), tokens.take(index)
        if self._may_repeat:
            starts = np.flatnonzero(np.diff(live, prepend=-1))  # of the runs
            counts = np.diff(starts, append=len(live))
            offsets = np.arange(len(live)) - np.repeat(starts, counts)
            self._tokens[live, self._num_tokens[live] + offsets] = tokens
            self._num_tokens[live[starts]] += counts
        else:
            num_tokens = self._num_tokens.take(live)
            self._tokens[live, num_tokens] = tokens
            self._num_tokens[live] = num_tokens + 1
        return self._source.take(live), self._seq_key.take(live), tokens, index.astype(np.int32)


class RowAccounts:
    """The account of each row's sequence, as a number, so that counting needs only arrays.

    A number is used for another account when no row belongs to its account any more.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._row_to_number = np.zeros(max_num_seqs, np.intp)
        self._account_to_number: dict[str, int] = {}
        self._names = [""] * max_num_seqs  # by number, as the next two
        self._num_rows = [0] * max_num_seqs
        self._free = list(reversed(range(max_num_seqs)))

    def open(self, row: int, account: str) -> None:
        """Set the account of a row."""
        number = self._account_to_number.get(account)
        if number is None:
            number = self._account_to_number[account] = self._free.pop()
            self._names[number] = account
        self._num_rows[number] += 1
        self._row_to_number[row] = number

    def close(self, row: int) -> None:
        """Forget the account of a row."""
        number = int(self._row_to_number[row])
        self._num_rows[number] -= 1
        if self._num_rows[number] == 0:
            del self._account_to_number[self._names[number]]
            self._free.append(number)

    def count(self, rows: Int32Array) -> Iterator[tuple[str, int]]:
        """Yield each account of `rows`, which all have sequences, and how many are of it."""
        counts = np.bincount(self._row_to_number[rows])
        for number in np.flatnonzero(counts).tolist():
            yield self._names[number], int(counts[number])
