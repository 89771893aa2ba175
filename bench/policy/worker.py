"""A simulated worker: it answers plans with the rows that sample and end, and computes nothing."""

from collections.abc import Callable
from dataclasses import dataclass

from contract.arrays import ints
from contract.step import NewSequence, Plan, Result


@dataclass(frozen=True, slots=True)
class Draw:
    """The next token of a sequence."""

    token_id: int
    is_last: bool = False
    """Whether it is a stop token."""


@dataclass(slots=True, eq=False)
class SimulatedRow:
    """The worker's state of a row."""

    new: NewSequence
    num_tokens: int
    """The number of known tokens, including sampled ones."""
    num_computed: int
    has_stopped: bool = False

    @property
    def num_outputs(self) -> int:
        """The number of tokens after the row's prompt."""
        return self.num_tokens - self.new.num_prompt_tokens

    @property
    def decodes(self) -> bool:
        """Whether the row computes one token in the next step without being named in the plan."""
        is_known = self.num_computed >= len(self.new.token_ids)
        return is_known and self.num_tokens < self.new.max_total_tokens


class SimulatedWorker:
    """The rows of a worker, without blocks. Every move between tiers succeeds at once."""

    def __init__(self, draw: Callable[[SimulatedRow], Draw]) -> None:
        """`draw` returns a row's token at index `row.num_outputs`, from 0."""
        self._draw = draw
        self._rows: dict[int, SimulatedRow] = {}
        self.num_context_tokens = 0
        """Tokens whose KV the rows of the last step read."""

    def execute(self, plan: Plan) -> Result:
        """Answer a plan. Plans must come in order, and each only once."""
        for row in plan.released_rows.tolist():
            del self._rows[row]
        for new in plan.new_sequences:
            num_computed = new.num_computed_tokens
            self._rows[new.row] = SimulatedRow(new, len(new.token_ids), num_computed)
        rows = self._rows
        sampling = [r for r, row in rows.items() if row.decodes and not row.has_stopped]
        for row in rows.values():  # a stopped row counts as decoding until it has its length
            if row.decodes:
                row.num_computed += 1
        active = set(sampling)
        for r, length in zip(plan.chunk_rows.tolist(), plan.chunk_lens.tolist(), strict=True):
            rows[r].num_computed += length
            active.add(r)
            if rows[r].num_computed == len(rows[r].new.token_ids):
                sampling.append(r)
        self.num_context_tokens = sum(rows[r].num_computed for r in active)
        return self._sample(plan, sampling)

    def _sample(self, plan: Plan, sampling: list[int]) -> Result:
        for row in self._rows.values():
            if row.has_stopped and row.decodes:
                row.num_tokens += 1
        token_ids, stopped = [], []
        for r in sampling:
            row = self._rows[r]
            draw = self._draw(row)
            row.num_tokens += 1
            row.has_stopped = draw.is_last
            token_ids.append(draw.token_id)
            if draw.is_last:
                stopped.append(r)
        return Result(
            step_id=plan.step_id,
            sampled_rows=ints(sampling),
            sampled_token_ids=ints(token_ids),
            stopped_rows=ints(stopped),
            failed_rows=ints([]),
            stored_disk_block_ids=plan.disk_store_dst_block_ids,
            loaded_host_block_ids=plan.disk_load_dst_block_ids,
        )
