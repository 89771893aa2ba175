"""A worker without a model: KV that remembers what it was computed from.

A slot's content is the whole context up to its token, so reading a block that was freed too early,
copied too late, shared wrongly or found by a wrong hash is seen at once, in the step that reads it.
The next token is a function of the context alone: an output depends on nothing that happened around
it, and what it must be is known beforehand.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from scheduler_svc.core.plan import NewSequence, StepOutcome, StepPlan

Context = tuple[object, ...]
END = 1  # the vocabulary is {0, 1}; 1 may end a sequence
VOID = 7  # the token of who computed from what a failed swap-in left: it must reach nobody
ARRIVING: Context = ("arriving",)
BROKEN: Context = ("broken",)


def next_token(context: Context) -> int:
    """One in four is 1."""
    return int(crc32(repr(("next", context)).encode()) % 4 == 0)


def stops(context: Context) -> bool:
    """Whether the 1 that `context` ends with ends the sequence."""
    return context[-1] == END and crc32(repr(context).encode()) % 2 == 0


def expected_output(salt: str, index: int, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What the sequence must produce."""
    context: Context = (salt, *prompt)
    output: list[int] = []
    while len(output) < max_tokens:
        token = next_token((index, context))
        output.append(token)
        context = (*context, token)
        if stops(context):
            break
    return output


@dataclass
class Row:
    new: NewSequence
    salt: str
    tokens: list[int]
    blocks: list[int]
    computed: int
    ended: bool = False
    is_void: bool = False

    def decodes(self) -> bool:
        started = self.computed >= len(self.new.token_ids)
        return started and len(self.tokens) < self.new.max_total_tokens

    def context(self, length: int) -> Context:
        return (self.salt, *self.tokens[:length])


class OracleWorker:
    """Executes plans as worker.proto says, and fails on the first wrong slot."""

    def __init__(
        self, num_blocks: int, block_size: int, num_rows: int, budget: int, num_host_blocks: int = 0
    ) -> None:
        self.block_size, self.num_rows, self.budget = block_size, num_rows, budget
        self.slots: list[Context | None] = [None] * (num_blocks * block_size)
        self.host = [[None] * block_size for _ in range(num_host_blocks)]
        """A block with BROKEN in it fails to be swapped in."""
        self.failed_in = -1  # the last step in which a swap-in failed
        self.rows: dict[int, Row] = {}
        self.computed_tokens = 0

    def execute(self, plan: StepPlan) -> StepOutcome:
        for row in plan.released_rows:
            del self.rows[int(row)]
        void = [r for r, row in self.rows.items() if row.is_void]
        assert not void, "computed from a failed swap-in, reported, and still running"
        for new in plan.new_sequences:
            assert new.row not in self.rows, "a new sequence gets a row in use"
            assert 0 <= new.row < self.num_rows
            tokens, blocks = new.token_ids.tolist(), new.block_ids.tolist()
            assert len(blocks) * self.block_size >= len(tokens)
            assert new.num_computed_tokens < len(tokens)
            salt = new.sampling.decode()  # the tests carry it there
            self.rows[new.row] = Row(new, salt, tokens, blocks, new.num_computed_tokens)
        for row, block in zip(plan.appended_rows, plan.appended_block_ids, strict=True):
            self.rows[int(row)].blocks.append(int(block))
        arriving = self._swap(plan)
        self._copy(plan.copy_src_block_ids.tolist(), plan.copy_dst_block_ids.tolist())

        decoding = {r: 1 for r, row in self.rows.items() if row.decodes()}
        assert len(decoding) == plan.num_decodes, "scheduler and worker count decodes differently"
        chunks = dict(zip(plan.chunk_rows.tolist(), plan.chunk_lens.tolist(), strict=True))
        assert not decoding.keys() & chunks.keys()
        work = {r: count for r, count in decoding.items() if not self.rows[r].ended} | chunks
        assert plan.num_scheduled_tokens == len(decoding) + sum(chunks.values()) <= self.budget
        for r, count in work.items():  # all KV of a step is stored before any is read
            self._store(self.rows[r], count)
        for _ in work if plan.step_id == self.failed_in + 1 else ():  # the failure is not known yet
            for r, count in work.items():
                self._spread(self.rows[r], count)
        for r, count in work.items():
            self._read(self.rows[r], count)
        return self._sample(plan, work, self._arrive(plan, arriving))

    def _block(self, block: int) -> slice:
        return slice(block * self.block_size, (block + 1) * self.block_size)

    def _swap(self, plan: StepPlan) -> dict[int, list[Context | None]]:
        """Swap out; return what is in which device block when the step is done."""
        sources, targets = plan.swap_in_src_block_ids.tolist(), plan.swap_in_dst_block_ids.tolist()
        outs = plan.swap_out_dst_block_ids.tolist()
        assert not (outs and targets), "a step swaps out and in"
        assert len({*outs}) == len(outs)
        assert len({*targets}) == len(targets)
        for block, host in zip(plan.swap_out_src_block_ids.tolist(), outs, strict=True):
            self.host[host] = self.slots[self._block(block)]
        arriving = {b: self.host[host] for host, b in zip(sources, targets, strict=True)}
        for block in arriving:
            self.slots[self._block(block)] = [ARRIVING] * self.block_size
        return arriving

    def _arrive(self, plan: StepPlan, arriving: dict[int, list[Context | None]]) -> list[int]:
        """Complete the swap-ins; return those that failed."""
        for block, content in arriving.items():
            assert self.slots[self._block(block)] == [ARRIVING] * self.block_size, "written early"
            self.slots[self._block(block)] = content
        failed = [block for block, content in arriving.items() if BROKEN in content]
        self.failed_in = plan.step_id if failed else self.failed_in
        return failed

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        read = [self.slots[self._block(block)] for block in sources]
        for block, content in zip(targets, read, strict=True):
            self.slots[self._block(block)] = content

    def _slots(self, row: Row, start: int, end: int) -> list[int]:
        places = [divmod(position, self.block_size) for position in range(start, end)]
        return [row.blocks[index] * self.block_size + offset for index, offset in places]

    def _store(self, row: Row, count: int) -> None:
        assert row.computed + count <= len(row.tokens)
        for slot in self._slots(row, row.computed, row.computed + count):
            self.slots[slot] = row.context(row.computed + 1)
            row.computed += 1

    def _spread(self, row: Row, count: int) -> None:
        """What is computed from broken KV is broken."""
        if any(self.slots[slot] == BROKEN for slot in self._slots(row, 0, row.computed)):
            row.is_void = True
            for slot in self._slots(row, row.computed - count, row.computed):
                self.slots[slot] = BROKEN

    def _read(self, row: Row, count: int) -> None:
        self.computed_tokens += count
        for position, slot in enumerate(self._slots(row, 0, row.computed)):
            right = row.is_void or self.slots[slot] == row.context(position + 1)
            assert right, f"wrong KV at position {position}"

    def _sample(self, plan: StepPlan, work: dict[int, int], failed: list[int]) -> StepOutcome:
        sampled, tokens, stopped = [], [], []
        for r in work:
            row = self.rows[r]
            if row.computed == len(row.tokens):
                context = row.context(len(row.tokens))
                token = VOID if row.is_void else next_token((row.new.output_index, context))
                row.tokens.append(token)
                sampled.append(r)
                tokens.append(token)
                if stops(row.context(len(row.tokens))):
                    row.ended = True
                    stopped.append(r)
        i32 = np.int32
        return StepOutcome(
            plan.step_id,
            np.array(sampled, i32),
            np.array(tokens, i32),
            np.array(stopped, i32),
            np.array([], i32),
            np.array(failed, i32),
        )
