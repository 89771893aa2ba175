"""The running sequences as arrays, indexed by row, so that one operation updates all of them."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from contract.arrays import Int32Array
from scheduler_svc.core.sequence import Sequence


class Rows:
    """One row for each running sequence; the worker uses the same row numbers.

    When a sequence stops, steps in flight may still compute its row. So the row stays in use until
    these steps have results. Until then the row's owner is None, and results for the row are
    ignored.
    """

    def __init__(
        self, max_num_seqs: int, max_len: int, block_size: int, num_draft_tokens: int = 0
    ) -> None:
        """Make `max_num_seqs` free rows, each for up to `max_len` tokens.

        A step appends up to `num_draft_tokens` + 1 tokens to a row.
        """
        self.max_num_seqs = max_num_seqs
        self._may_repeat = num_draft_tokens > 0
        self._owner: list[Sequence | None] = [None] * max_num_seqs
        self._free = list(reversed(range(max_num_seqs)))
        # `zeros` uses calloc, so the system allocates each memory page only at its first use.
        width = -(-max_len // block_size) * block_size
        self._tokens = np.zeros((max_num_seqs, width), "<i4")
        self._blocks = self._tokens.view(f"V{4 * block_size}")  # one item has the bytes of a block
        self._num_tokens = np.zeros(max_num_seqs, np.int32)
        self._takes_sampled = np.zeros(max_num_seqs, np.bool_)
        self._source = np.zeros(max_num_seqs, np.int32)
        self._seq_key = np.zeros(max_num_seqs, np.uint64)
        self.accounts = RowAccounts(max_num_seqs)
        self.num_reserved = 0
        """Number of free rows reserved for beams (`BeamGroups`), or for sequences that the worker
        keeps from an earlier scheduler (`Takeover`)."""

    @property
    def num_free(self) -> int:
        """Number of free rows that are not reserved."""
        return len(self._free) - self.num_reserved

    @property
    def free(self) -> tuple[int, ...]:
        """The free rows, including reserved ones."""
        return tuple(self._free)

    def occupy(self, seq: Sequence) -> int:
        """Give a free row to `seq`, store its known tokens there, and return the row."""
        row = self._free.pop()
        self._owner[row] = seq
        self.set_tokens(row, seq.token_ids)
        self._source[row] = seq.request.source
        self._seq_key[row] = seq.seq_key
        # Beams get their tokens from the search instead.
        self._takes_sampled[row] = seq.group is None
        self.accounts.open(row, seq.rank.account)
        return row

    def set_tokens(self, row: int, token_ids: Int32Array) -> None:
        """Set the known tokens of a row."""
        self._tokens[row, : len(token_ids)] = token_ids
        self._num_tokens[row] = len(token_ids)

    def abandon(self, row: int) -> None:
        """Remove the owner of a row; the caller must free the row later (`give_back`)."""
        self._owner[row] = None
        self._takes_sampled[row] = False
        self.accounts.close(row)

    def give_back(self, row: int) -> None:
        """Free an abandoned row."""
        self._free.append(row)

    def owner(self, row: int) -> Sequence | None:
        """Return the sequence that owns the row, if any."""
        return self._owner[row]

    @property
    def num_tokens_by_row(self) -> Int32Array:
        """int32[max_num_seqs], read-only: the number of known tokens of each row."""
        return self._num_tokens

    def num_tokens(self, row: int) -> int:
        return int(self._num_tokens[row])

    def tokens(self, row: int) -> Int32Array:
        """Return int32[num_tokens], a view of the known tokens of a row."""
        return self._tokens[row, : self._num_tokens[row]]

    def known_tokens(self, seq: Sequence) -> Int32Array:
        """Return int32[N], a copy of a sequence's known tokens, whether it runs or not."""
        return (seq.token_ids if seq.row is None else self.tokens(seq.row)).copy()

    def read_blocks(self, rows: list[int], indices: list[int]) -> list[bytes]:
        """Return one full block of known tokens of each row, as little-endian int32.

        Block `indices[i]` is read from row `rows[i]`.
        """
        data: list[bytes] = self._blocks[rows, indices].tolist()
        return data

    def append(
        self, rows: Int32Array, token_ids: Int32Array
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint64], Int32Array, Int32Array]:
        """Append `token_ids[i]` to row `rows[i]`; skip rows that a beam owns or that have no owner.

        Without draft tokens the rows are distinct. With draft tokens a row may occur several times
        in succession.

        Returns:
            The sources, sequence keys and token ids of the appended tokens, and their indices in
            `rows`.
        """
        live, tokens = rows.astype(np.intp), token_ids  # intp saves a conversion at each access
        index = np.flatnonzero(self._takes_sampled.take(live))
        if len(index) < len(rows):
            live, tokens = live.take(index), tokens.take(index)
        if self._may_repeat:
            starts = np.flatnonzero(np.diff(live, prepend=-1))  # where each row's tokens begin
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
    """Gives each account that has rows a number, so that arrays can count the rows by account.

    An account without rows loses its number, which another account may get.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._row_to_number = np.zeros(max_num_seqs, np.intp)
        self._account_to_number: dict[str, int] = {}
        self._names = [""] * max_num_seqs  # indexed by number, like `_num_rows`
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
        """Remove the account of a row."""
        number = int(self._row_to_number[row])
        self._num_rows[number] -= 1
        if self._num_rows[number] == 0:
            del self._account_to_number[self._names[number]]
            self._free.append(number)

    def count(self, rows: Int32Array) -> Iterator[tuple[str, int]]:
        """Yield each account of `rows` with its number of rows; every row must have a sequence."""
        counts = np.bincount(self._row_to_number[rows])
        for number in np.flatnonzero(counts).tolist():
            yield self._names[number], int(counts[number])
