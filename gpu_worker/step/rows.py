"""The persistent batch: the state of the sequence in each row, and which rows compute in a step.

A row is free, prefills or *decodes*. A row that prefills computes its tokens in chunks. A decoding
row computes its last sampled token in every step. `apply` knows at once whether a row samples a
token; the token's value arrives later (`store_sampled`), perhaps after the next step was started.
So the number of tokens of a row does not depend on the values of its tokens. Only the calls of
`end`, which end a sequence early, depend on values.

With guessed tokens (`speculative/verify.py`), the number of tokens that a row gains in a step
depends on the values of tokens. So `advance` must count the tokens of a step before the next step
is applied.

Each row's tokens, by position::

    [0, num_computed)           their KV is in the row's blocks once all applied steps are done
    [num_computed, num_tokens)  to be computed; exactly one token while the row decodes
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from contract.arrays import BoolArray, Int32Array, Int64Array
from contract.errors import InconsistentPlanError, InvalidArgumentError
from contract.state import HeldRow
from contract.step import NewSequence, Plan, StepLogprob
from contract.worker_limits import Limits, first_seen

_NUM_LOGPROBS = 32
"""A row keeps the log-probabilities of this many last tokens for the next scheduler. When a
scheduler dies, fewer than this many tokens of a row are on their way to a router."""


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledRows:
    """The rows that compute in a step, decoding rows first, and which of these rows sample.

    Symbols: `S` rows that compute, `N` tokens that are sampled. Unless described otherwise, an
    array is int64[S], and its element i belongs to `rows[i]`.
    """

    rows: Int64Array
    """Rows that decode without guesses, ascending; then rows that decode with guesses; then rows
    with a chunk, in the batch's order."""
    starts: Int64Array
    """Position of the first token that each row computes."""
    lens: Int64Array
    """Number of tokens that each row computes; 1 for rows that decode without guesses."""
    num_decodes: int
    sampling: Int64Array
    """int64[N]: indexes into `rows` of the rows that sample, ascending. A row samples if it
    computes its last token. A row with guesses appears once for each token that it computes."""
    positions: Int64Array
    """int64[N]: each sampled token's index in its sequence."""
    incarnations: Int64Array
    """The value of `Rows.incarnation` for each row; it identifies the row's sequence."""
    num_drafting: int = 0
    """Number of rows that decode with guesses; they follow the `num_decodes` rows without
    guesses."""
    guesses: Int64Array | None = None
    """int64[N]: the guess for each sampled token, or NO_TOKEN; None: no row has guesses."""

    @property
    def num_tokens(self) -> int:
        return int(self.lens.sum())


class Rows:
    """All rows of a worker. `apply` is called once per step, in order, before the step computes."""

    def __init__(self, limits: Limits, *, has_guesses: bool = False) -> None:
        """`has_guesses`: whether rows may decode with guesses.

        If so, `advance` must be called after each step, to count the tokens that rows gained.
        """
        num_rows = limits.max_num_seqs
        self._has_guesses = has_guesses
        self._limits = limits
        self.token_ids = np.zeros((num_rows, limits.max_model_len), np.int32)
        """int32[R, max_model_len], for R rows: the tokens whose values have arrived."""
        self.windows = limits.kv_windows
        """The window of each KV group."""
        self.num_groups = len(limits.kv_windows)
        self.block_tables = np.zeros((num_rows, limits.max_table_len), np.int32)
        """int32[R, M * G]: the block table of each row. A table has at most M block indices, and
        for each block index one block of each of the G KV groups. Entries behind a group's window
        are stale: the scheduler may have given their blocks to other sequences."""
        self.num_blocks = np.zeros(num_rows, np.int64)
        """Number of blocks of one KV group in each block table, stale entries included. Until the
        row gets another sequence, the number only grows."""
        self.table_version = np.zeros(num_rows, np.int64)
        """By row: incremented when the row's block table changes in another way than by growing."""
        self.num_prompt = np.zeros(num_rows, np.int64)
        self.num_tokens = np.zeros(num_rows, np.int64)
        self.num_computed = np.zeros(num_rows, np.int64)
        self.max_total = np.zeros(num_rows, np.int64)
        self.adapter = np.zeros(num_rows, np.int64)
        self.is_used = np.zeros(num_rows, np.bool_)
        self.is_decoding = np.zeros(num_rows, np.bool_)
        """Whether the scheduler counts the row as decoding. A row whose sequence has ended still
        counts as decoding until the scheduler releases the row."""
        self.incarnation = np.zeros(num_rows, np.int64)
        """Incremented when a row gets a sequence, and by `clear`. So a result for an earlier
        sequence of the row is not taken for a result of the current one."""
        self.ended_incarnation = np.full(num_rows, -1, np.int64)
        """Each row's last incarnation for which `end` was called. The sequence of that incarnation
        is no longer computed."""
        self._ended_len = np.zeros(num_rows, np.int64)
        """Length of each row's ended sequence. `num_tokens` keeps growing, because the scheduler
        counts the row as decoding until it releases the row."""
        self._has_stopped = np.zeros(num_rows, np.bool_)
        """By row: whether the last token of its ended sequence is an end token."""
        self._new: list[NewSequence | None] = [None] * num_rows
        """The sequence of each row, as the plan described it."""
        self._logprobs: dict[int, deque[StepLogprob]] = {}
        """By row: the log-probabilities of its last tokens, if a request wants them."""

    @property
    def num_used(self) -> int:
        return int(self.is_used.sum())

    def apply(self, plan: Plan) -> ScheduledRows:
        """Apply the plan of a step, and count the step's tokens as computed.

        Raises:
            InvalidArgumentError: The plan contradicts the rows' state, or computes more tokens than
                fit in a step or in a row's blocks.
            InconsistentPlanError: The plan's `num_decodes` is not the number of decoding rows.

        After an error the state of the rows is undefined until `clear` is called.
        """
        if len(plan.released_rows):
            self._release(plan.released_rows)
        for new_row in plan.new_sequences:
            self._add(new_row)
        if len(plan.appended_rows):
            self._append_blocks(plan.appended_rows, plan.appended_block_ids)
        if len(plan.placements):
            self._place_blocks(plan.placements)
        self._rename_blocks(plan.renamed_src_block_ids, plan.renamed_dst_block_ids)
        return self._schedule(plan)

    def advance(self, rows: Int64Array, num_tokens: Int64Array) -> None:
        """Count the tokens that decoding rows gained in a step. Both arguments are int64[N].

        A row's sequence ends when it has `max_total` tokens.
        """
        self.num_tokens[rows] += num_tokens
        self.num_computed[rows] = self.num_tokens[rows] - 1
        full = rows[self.num_tokens[rows] >= self.max_total[rows]]
        full = full[~self.has_ended(full, self.incarnation[full])]
        no_stops = np.zeros(len(full), np.bool_)
        self.end(full, self.incarnation[full], self.num_tokens[full], no_stops)

    def is_current(self, rows: Int64Array, incarnations: Int64Array) -> BoolArray:
        """Return bool[N]: whether each row still has the sequence of the given incarnation."""
        current: BoolArray = self.incarnation[rows] == incarnations
        return current

    def store_sampled(
        self, rows: Int64Array, incarnations: Int64Array, positions: Int64Array, values: Int64Array
    ) -> None:
        """Store sampled tokens that have arrived; drop tokens of sequences that lost their row."""
        current = self.is_current(rows, incarnations)
        self.token_ids[rows[current], positions[current]] = values[current]

    def store_logprobs(
        self, rows: Int64Array, incarnations: Int64Array, logprobs: Iterable[StepLogprob]
    ) -> None:
        """Keep log-probabilities that have arrived, for the next scheduler.

        Args:
            rows: int64[N], rows that sampled a token each.
            incarnations: int64[N]; log-probabilities of sequences that lost their row are dropped.
            logprobs: The `index` of each is the index in `rows` of the row that sampled the token.
        """
        for logprob in logprobs:
            row = int(rows[logprob.index])
            if self.incarnation[row] == incarnations[logprob.index]:
                self._logprobs.setdefault(row, deque(maxlen=_NUM_LOGPROBS)).append(logprob)

    def end(
        self,
        rows: Int64Array,
        incarnations: Int64Array,
        num_tokens: Int64Array,
        has_stopped: BoolArray,
    ) -> None:
        """Stop computing these sequences. Some may have lost their rows already.

        Args:
            rows: int64[N].
            incarnations: int64[N].
            num_tokens: int64[N], each sequence's number of tokens.
            has_stopped: bool[N], whether each sequence's last token is an end token.
        """
        self.ended_incarnation[rows] = incarnations
        self._ended_len[rows] = num_tokens
        self._has_stopped[rows] = has_stopped

    def has_ended(self, rows: Int64Array, incarnations: Int64Array) -> BoolArray:
        ended: BoolArray = self.ended_incarnation[rows] == incarnations
        return ended

    def block_table(self, row: int, num_computed: int | None = None) -> Int32Array:
        """Copy the row's block table; in the copy, entries behind a window are 0.

        The copy is int32[N * G], for N blocks of each of the G KV groups. `num_computed` is the
        number of tokens with KV; None: the number in `Rows.num_computed`.
        """
        table = self.block_tables[row, : self.num_blocks[row] * self.num_groups].copy()
        if self._limits.has_windows:
            computed = self.num_computed[row] if num_computed is None else num_computed
            table[self._is_behind(np.array([computed]))[0, : len(table)]] = 0
        return table

    def blocks_of(self, rows: Int64Array, indices: Int64Array) -> Int32Array:
        """Return the blocks of all G groups at the block index `indices[i]` of each row `rows[i]`.

        `rows` and `indices` are int64[N]; the result is int32[N * G].
        """
        if self.num_groups == 1:
            return self.block_tables[rows, indices]
        entries = indices[:, None] * self.num_groups + np.arange(self.num_groups)
        blocks: Int32Array = self.block_tables[rows[:, None], entries].ravel()
        return blocks

    def held(self, is_broken: Callable[[Int32Array], bool]) -> tuple[HeldRow, ...]:
        """Describe, for the next scheduler, the sequences that have an identity (`NewSequence`).

        All steps' results must have arrived.

        Args:
            is_broken: Whether a block of a block table has wrong KV; the table's sequence is then
                left out.
        """
        held = []
        for row in np.flatnonzero(self.is_used).tolist():
            new = self._new[row]
            assert new is not None, "a used row was announced"
            num_tokens, has_stopped = int(self.num_tokens[row]), False
            if self.ended_incarnation[row] == self.incarnation[row]:
                num_tokens, has_stopped = int(self._ended_len[row]), bool(self._has_stopped[row])
            num_computed = min(int(self.num_computed[row]), num_tokens - 1)
            blocks = self.block_table(row, num_computed)
            if not new.identity or is_broken(blocks):
                continue
            held.append(
                HeldRow(
                    identity=new.identity,
                    token_ids=self.token_ids[row, :num_tokens].copy(),
                    num_computed_tokens=num_computed,
                    block_ids=blocks,
                    has_stopped=has_stopped,
                    had_logprobs=new.params.logprobs is not None,
                    note=new.note,
                    logprobs=tuple(self._logprobs.get(row, ())),
                )
            )
        return tuple(held)

    def adapters_in_use(self) -> set[int]:
        """Return the adapter numbers of the rows in use; 0 stands for a row without an adapter."""
        return set(self.adapter[self.is_used].tolist())

    def first_with_block_from(self, block: int) -> int | None:
        """Return the first row that uses block number `block` or a higher one, if any."""
        num_entries = self.num_blocks[:, None] * self.num_groups
        is_own = np.arange(self.block_tables.shape[1]) < num_entries
        if self._limits.has_windows:
            is_own &= ~self._is_behind(self.num_computed)
        is_beyond = is_own & (self.block_tables >= block) & self.is_used[:, None]
        (rows,) = np.nonzero(is_beyond.any(axis=1))
        return int(rows[0]) if len(rows) else None

    def clear(self) -> None:
        self.is_used[:] = False
        self.is_decoding[:] = False
        self.incarnation += 1

    def _release(self, rows: Int32Array) -> None:
        _require(self.is_used[rows], "released_rows", rows, "which is free")
        self.is_used[rows] = False
        self.is_decoding[rows] = False

    def _add(self, new: NewSequence) -> None:
        row, num_tokens, num_entries = new.row, len(new.token_ids), len(new.block_ids)
        if self.is_used[row]:
            raise InvalidArgumentError("new_sequences.row", f"is {row}, which is in use")
        self.token_ids[row, :num_tokens] = new.token_ids
        self.block_tables[row, :num_entries] = new.block_ids
        self.num_blocks[row] = num_entries // self.num_groups
        self.table_version[row] += 1
        self.num_prompt[row] = new.num_prompt_tokens
        self.num_tokens[row] = num_tokens
        self.num_computed[row] = new.num_computed_tokens
        self.max_total[row] = new.max_total_tokens
        self.adapter[row] = new.adapter
        self.is_used[row] = True
        self.incarnation[row] += 1
        self._new[row] = new
        self._logprobs.pop(row, None)

    def _append_blocks(self, rows: Int32Array, block_ids: Int32Array) -> None:
        _require(self.is_used[rows], "appended_rows", rows, "which is free")
        firsts = self.num_blocks[rows] * self.num_groups
        has_room = firsts < self.block_tables.shape[1]
        _require(has_room, "appended_rows", rows, "whose block table is full")
        if self.num_groups == 1:
            self.block_tables[rows, firsts] = block_ids
        else:
            entries = firsts[:, None] + np.arange(self.num_groups)
            self.block_tables[rows[:, None], entries] = block_ids.reshape(entries.shape)
        self.num_blocks[rows] += 1

    def _place_blocks(self, placements: Int32Array) -> None:
        rows, entries, block_ids = placements.reshape(-1, 3).T
        _require(self.is_used[rows], "placements", rows, "which is free")
        is_own = entries < self.num_blocks[rows] * self.num_groups
        _require(is_own, "placements", entries, "beyond the end of the row's block table")
        self.block_tables[rows, entries] = block_ids
        self.table_version[rows] += 1

    def _is_behind(self, num_computed: Int64Array) -> BoolArray:
        """Return for each entry of block tables whether it is behind its group's window.

        The tokens at position `num_computed` and later do not see the block of such an entry.
        `num_computed` is int64[N], for N tables; the result is bool[N, M * G].
        """
        groups, size = self.num_groups, self._limits.block_size
        firsts = np.zeros((len(num_computed), groups), np.int64)
        for group, window in enumerate(self._limits.kv_windows):
            firsts[:, group] = first_seen(window, num_computed) // size
        entries = np.arange(self.block_tables.shape[1])
        is_behind: BoolArray = entries // groups < firsts[:, entries % groups]
        return is_behind

    def _rename_blocks(self, src: Int32Array, dst: Int32Array) -> None:
        if len(src):
            (used,) = np.nonzero(self.is_used)
            width = self.num_blocks[used].max(initial=0) * self.num_groups
            tables = self.block_tables[used, :width]  # entries past a row's table are stale
            names = np.arange(1 + max(tables.max(initial=0), src.max()), dtype=np.int32)
            names[src] = dst
            self.block_tables[used, :width] = names[tables]
            self.table_version[used] += 1

    def _schedule(self, plan: Plan) -> ScheduledRows:
        (decoding,) = self.is_decoding.nonzero()  # int64[num_decodes], by the scheduler's count
        if len(decoding) != plan.num_decodes:
            raise InconsistentPlanError(
                f"num_decodes is {plan.num_decodes}, but {len(decoding)} rows decode in step "
                f"{plan.step_id}"
            )
        # int64[C] each, for C chunks
        chunk_rows, chunk_lens = plan.chunk_rows.astype(np.int64), plan.chunk_lens.astype(np.int64)
        if len(chunk_rows):
            self._require_computable(chunk_rows, chunk_lens)
        decodes = decoding[~self.has_ended(decoding, self.incarnation[decoding])]
        rows = np.concatenate([decodes, chunk_rows])  # [S]
        lens = np.concatenate([np.ones(len(decodes), np.int64), chunk_lens])  # [S]
        if (num_tokens := int(lens.sum())) > self._limits.max_num_batched_tokens:
            raise InvalidArgumentError(
                "chunk_lens",
                f"makes {num_tokens} tokens with the decodes; a step computes at most "
                f"{self._limits.max_num_batched_tokens}",
            )
        starts = self.num_computed[rows]
        room = self.num_blocks[rows] * self._limits.block_size  # [S], tokens
        has_room = starts + lens <= room
        if not has_room.all():
            row = rows[np.argmin(has_room)]
            raise InvalidArgumentError(
                "appended_rows", f"lacks {row}: its block table is too short"
            )

        # Ended rows advance, too, because the scheduler counts them until it releases them.
        self.num_computed[chunk_rows] += chunk_lens
        is_last = self.num_computed[chunk_rows] == self.num_tokens[chunk_rows]  # bool[C]
        sampled = chunk_rows[is_last]
        if not self._has_guesses:
            self.num_computed[decoding] += 1
            sampled = np.concatenate([decoding, sampled])
        self.num_tokens[sampled] += 1
        self.is_decoding[sampled] = self.num_tokens[sampled] < self.max_total[sampled]
        sampling = np.concatenate([np.arange(len(decodes)), len(decodes) + is_last.nonzero()[0]])
        return ScheduledRows(
            rows=rows,
            starts=starts,
            lens=lens,
            num_decodes=len(decodes),
            sampling=sampling,
            positions=(starts + lens)[sampling],
            incarnations=self.incarnation[rows],
        )

    def _require_computable(self, rows: Int64Array, lens: Int64Array) -> None:
        _require(self.is_used[rows], "chunk_rows", rows, "which is free")
        _require(~self.is_decoding[rows], "chunk_rows", rows, "which decodes")
        has_room = self.num_tokens[rows] < self.max_total[rows]
        _require(has_room, "chunk_rows", rows, "which already has its max_total_tokens")
        num_left = self.num_tokens[rows] - self.num_computed[rows]
        _require(
            lens <= num_left, "chunk_lens", lens, "more tokens than the row has left to compute"
        )


def _require(holds: BoolArray, field: str, values: Int32Array | Int64Array, problem: str) -> None:
    """Raise InvalidArgumentError for the first of `values` for which `holds` is false."""
    if not holds.all():
        value = values[np.argmin(holds)]
        raise InvalidArgumentError(field, f"has {value}, {problem}")
