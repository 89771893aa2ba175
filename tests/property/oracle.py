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

    def decodes(self) -> bool:
        started = self.computed >= len(self.new.token_ids)
        return started and len(self.tokens) < self.new.max_total_tokens

    def context(self, length: int) -> Context:
        return (self.salt, *self.tokens[:length])


class OracleWorker:
    """Executes plans as worker.proto says, and fails on the first wrong slot."""

    def __init__(self, num_blocks: int, block_size: int, num_rows: int, budget: int) -> None:
        self.block_size, self.num_rows, self.budget = block_size, num_rows, budget
        self.slots: list[Context | None] = [None] * (num_blocks * block_size)
        self.rows: dict[int, Row] = {}
        self.computed_tokens = 0

    def execute(self, plan: StepPlan) -> StepOutcome:
        for row in plan.released_rows:
            del self.rows[int(row)]
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
        self._copy(plan.copy_src_block_ids.tolist(), plan.copy_dst_block_ids.tolist())

        decoding = {r: 1 for r, row in self.rows.items() if row.decodes()}
        assert len(decoding) == plan.num_decodes, "scheduler and worker count decodes differently"
        chunks = dict(zip(plan.chunk_rows.tolist(), plan.chunk_lens.tolist(), strict=True))
        assert not decoding.keys() & chunks.keys()
        work = {r: count for r, count in decoding.items() if not self.rows[r].ended} | chunks
        assert plan.num_scheduled_tokens == len(decoding) + sum(chunks.values()) <= self.budget
        for store in (True, False):  # all KV of a step is stored before any is read
            for r, count in work.items():
                self._compute(self.rows[r], count, store=store)
        return self._sample(plan, work)

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        size = self.block_size
        read = [self.slots[block * size : (block + 1) * size] for block in sources]
        for block, content in zip(targets, read, strict=True):
            self.slots[block * size : (block + 1) * size] = content

    def _slot(self, row: Row, position: int) -> int:
        return (
            row.blocks[position // self.block_size] * self.block_size + position % self.block_size
        )

    def _compute(self, row: Row, count: int, *, store: bool) -> None:
        end = row.computed + count
        assert end <= len(row.tokens)
        for position in range(row.computed if store else 0, end):
            if store:
                self.slots[self._slot(row, position)] = row.context(position + 1)
            else:
                found = self.slots[self._slot(row, position)]
                assert found == row.context(position + 1), f"wrong KV at position {position}"
        if not store:
            row.computed = end
            self.computed_tokens += count

    def _sample(self, plan: StepPlan, work: dict[int, int]) -> StepOutcome:
        sampled, tokens, stopped = [], [], []
        for r in work:
            row = self.rows[r]
            if row.computed == len(row.tokens):
                token = next_token((row.new.output_index, row.context(len(row.tokens))))
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
        )
