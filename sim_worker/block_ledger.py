"""Tracks owners and contents of device blocks, to detect wrong block numbers.

With a wrong block number, a real worker would read another sequence's KV and compute nonsense; a
simulated worker raises an error. A slot holds a digest of all tokens of its sequence, up to the
slot's token. So a block that is shared by mistake, freed too early or copied too late holds
unexpected digests.

Each row's table, by block::

    [0, num_computed // block_size)   shared with rows that have the same prefix; only read
    [num_computed // block_size, ..)  the row's own; in no other table
"""

import numpy as np
import numpy.typing as npt

from contract.arrays import Int32Array, Int64Array
from contract.errors import InconsistentPlanError
from contract.step import NewSequence, Plan
from contract.worker_limits import Limits
from gpu_worker.step.rows import Rows, ScheduledRows
from sim_worker.tier_ledger import TierLedger

_NO_ROW = -1


class BlockLedger:
    """The device's KV memory of a simulated worker; `tiers` is its host and disk memory."""

    def __init__(self, limits: Limits, tiers: TierLedger) -> None:
        self._tiers = tiers
        self._block_size = limits.block_size
        self._num_holders = np.zeros(limits.num_blocks, np.int32)
        """How many tables each block is in."""
        self._writer = np.full(limits.num_blocks, _NO_ROW, np.int32)
        """The row that may write each block."""
        self._slots = np.zeros((limits.num_blocks, limits.block_size), np.uint64)
        self._arriving = np.empty(0, np.int32)
        """Blocks that the previous step swapped in; readable from this step on."""
        self._arriving_slots = np.zeros((0, limits.block_size), np.uint64)
        self._digests = np.zeros(limits.max_num_seqs, np.uint64)
        """The digest of each row's computed tokens."""
        # A digest is a sum of tokens with these weights, modulo 2^64. So one cumulative sum gives
        # all digests of a prefix.
        self._weights = np.random.default_rng(0).integers(
            1, 2**64, limits.max_model_len, np.uint64, endpoint=False
        )

    def resize(self, num_blocks: int) -> None:
        """Set the number of device blocks to `num_blocks`; removed blocks must be in no table."""
        self._arrive()
        num_kept = min(num_blocks, len(self._writer))
        for name, nothing in (("_num_holders", 0), ("_writer", _NO_ROW), ("_slots", 0)):
            before = getattr(self, name)
            after = np.full((num_blocks, *before.shape[1:]), nothing, before.dtype)
            after[:num_kept] = before[:num_kept]
            setattr(self, name, after)

    def clear(self) -> None:
        """Release all tables; the contents stay."""
        self._arrive()
        self._num_holders[:] = 0
        self._writer[:] = _NO_ROW

    def apply(
        self, plan: Plan, released: list[Int32Array], rows: Rows, scheduled: ScheduledRows
    ) -> None:
        """Apply the block changes of a step, after `rows.apply`.

        Args:
            plan: The plan of the step.
            released: The block tables of `plan.released_rows` before the step.
            rows: The rows after the step's changes.
            scheduled: The tokens that each row computes.

        Raises:
            InconsistentPlanError: A block belongs to another row, or has the wrong content.
        """
        self._arrive()
        for row, table in zip(plan.released_rows.tolist(), released, strict=True):
            self._num_holders[table] -= 1
            self._writer[table[self._writer[table] == row]] = _NO_ROW
        for new in plan.new_sequences:
            num_shared = new.num_computed_tokens // self._block_size
            self._num_holders[new.block_ids[:num_shared]] += 1
            own = new.block_ids[num_shared:]
            self._own(np.full(len(own), new.row), own)
            self._digests[new.row] = self._prefix(new)[-1] if new.num_computed_tokens else 0
        self._own(plan.appended_rows, plan.appended_block_ids)
        self._rename(plan.renamed_src_block_ids, plan.renamed_dst_block_ids)
        self._swap(plan)
        if len(plan.copy_src_block_ids):
            self._slots[plan.copy_dst_block_ids] = self._slots[plan.copy_src_block_ids]
        self._write(rows, scheduled)
        for new in plan.new_sequences:
            self._check_prefix(new, rows)

    def _arrive(self) -> None:
        """Complete the swap-ins of the step before."""
        self._slots[self._arriving] = self._arriving_slots
        self._arriving, self._arriving_slots = self._arriving[:0], self._arriving_slots[:0]

    def _swap(self, plan: Plan) -> None:
        """Copy swap-outs now; swap-ins can be read from the next step on."""
        if len(out := plan.swap_out_src_block_ids):
            self._tiers.swap_out(self._slots[out], plan.swap_out_dst_block_ids)
        if not len(arriving := plan.swap_in_dst_block_ids):
            return
        held = self._num_holders[arriving] > 0
        if held.any():
            block = arriving[np.argmax(held)]
            raise InconsistentPlanError(
                f"KV is swapped in to block {block}, which is in {self._num_holders[block]} tables"
            )
        self._arriving_slots = self._tiers.swap_in(plan.swap_in_src_block_ids)
        self._arriving = arriving
        self._slots[arriving] = 0

    def _own(self, rows: Int32Array | Int64Array, blocks: Int32Array) -> None:
        """Add each block to its row's table, for the row to write; no other table may have it."""
        if not len(blocks):
            return
        np.add.at(self._num_holders, blocks, 1)
        shared = self._num_holders[blocks] > 1
        if shared.any():
            index = int(np.argmax(shared))
            raise InconsistentPlanError(
                f"row {rows[index]} gets block {blocks[index]} to write, which is in "
                f"{self._num_holders[blocks[index]] - 1} other tables"
            )
        self._writer[blocks] = rows

    def _rename(self, src: Int32Array, dst: Int32Array) -> None:
        """Move holders and writers to the blocks' new numbers, which must be in no table."""
        holders, writers = self._num_holders[src], self._writer[src]
        self._num_holders[src], self._writer[src] = 0, _NO_ROW
        taken = self._num_holders[dst] > 0
        if taken.any():
            index = int(np.argmax(taken))
            raise InconsistentPlanError(
                f"block {src[index]} is renamed to {dst[index]}, which is in a table"
            )
        self._num_holders[dst], self._writer[dst] = holders, writers

    def _write(self, rows: Rows, scheduled: ScheduledRows) -> None:
        """Write the scheduled tokens: all single tokens at once, longer chunks one by one."""
        is_single = scheduled.lens == 1
        of, positions = scheduled.rows[is_single], scheduled.starts[is_single]
        digests = self._digests[of] + self._terms(rows.token_ids[of, positions], positions)
        self._store(rows, of, positions, digests)
        self._digests[of] = digests
        for index in np.flatnonzero(~is_single).tolist():
            row, start = int(scheduled.rows[index]), int(scheduled.starts[index])
            positions = np.arange(start, start + int(scheduled.lens[index]))
            terms = self._terms(rows.token_ids[row, positions], positions)
            digests = self._digests[row] + np.cumsum(terms, dtype=np.uint64)
            self._store(rows, np.full(len(positions), row), positions, digests)
            self._digests[row] = digests[-1]

    def _store(
        self, rows: Rows, of: Int64Array, positions: Int64Array, digests: npt.NDArray[np.uint64]
    ) -> None:
        """Store uint64[N] `digests` at int64[N] `positions` of the rows `of`, int64[N]."""
        blocks = rows.block_tables[of, positions // self._block_size]
        foreign = self._writer[blocks] != of
        if foreign.any():
            index = int(np.argmax(foreign))
            raise InconsistentPlanError(
                f"row {of[index]} writes position {positions[index]} to block {blocks[index]}, "
                "which is not its own"
            )
        self._slots[blocks, positions % self._block_size] = digests

    def _check_prefix(self, new: NewSequence, rows: Rows) -> None:
        """Check the slots of the tokens that a new sequence need not compute."""
        positions = np.arange(new.num_computed_tokens)
        blocks = rows.block_tables[new.row, positions // self._block_size]
        wrong = self._slots[blocks, positions % self._block_size] != self._prefix(new)
        if wrong.any():
            index = int(np.argmax(wrong))
            raise InconsistentPlanError(
                f"sequence {new.seq_id} has {new.num_computed_tokens} tokens computed, but block "
                f"{blocks[index]} does not hold its position {index}"
            )

    def _prefix(self, new: NewSequence) -> npt.NDArray[np.uint64]:
        """Return uint64[num_computed_tokens]: the digests that its computed tokens must have."""
        positions = np.arange(new.num_computed_tokens)
        terms = self._terms(new.token_ids[: new.num_computed_tokens], positions)
        return np.cumsum(terms, dtype=np.uint64)

    def _terms(self, token_ids: Int32Array, positions: Int64Array) -> npt.NDArray[np.uint64]:
        terms: npt.NDArray[np.uint64] = (token_ids.astype(np.uint64) + np.uint64(1)) * (
            self._weights[positions]
        )
        return terms
