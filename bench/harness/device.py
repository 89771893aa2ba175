"""Simulated devices: a worker that computes nothing, and a simulated clock."""

import heapq
import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from contract.arrays import Int32Array, ints
from contract.step import NewSequence, Plan, Result


class Clock:
    """Runs callbacks in the order of their times, in seconds; on a tie, as they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), do))

    def run(self) -> None:
        """Run all callbacks, including callbacks that are added meanwhile."""
        while self._events:
            self.now, _, do = heapq.heappop(self._events)
            do()


class SimulatedWorker:
    """Executes plans in order, with arrays over rows, and returns which rows have sampled.

    A row decodes until it has `max_total_tokens`, as scheduler and worker count. With one step in
    flight, a row may stop earlier (`stop_at`). Every move between tiers succeeds at once.
    """

    def __init__(
        self,
        max_num_seqs: int,
        draw: Callable[[NewSequence, int], int] | None = None,
        stop_at: Callable[[NewSequence], int] | None = None,
    ) -> None:
        """`draw` returns a sequence's token at an index, which counts the prompt; by default 0.

        `stop_at` returns how many tokens, including the prompt, a sequence has when it stops.
        """
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        """By row, the number of tokens whose KV is valid."""
        self.sequences: dict[int, NewSequence] = {}
        """The sequence of each row, from its start to its release."""
        self._num_known = self.num_computed.copy()
        self._end = self.num_computed.copy()
        self._stop = self.num_computed.copy()
        self._is_decoding = np.zeros(max_num_seqs, bool)
        self._draw = draw
        self._stop_at = stop_at
        self.num_context_tokens = 0
        """Tokens whose KV the rows of the last step read."""

    @property
    def num_decoding(self) -> int:
        return int(self._is_decoding.sum())

    def execute(self, plan: Plan) -> Result:
        for row in plan.released_rows.tolist():
            del self.sequences[row]
            self._is_decoding[row] = False
        for new in plan.new_sequences:
            self.sequences[new.row] = new
            self._num_known[new.row] = len(new.token_ids)
            self.num_computed[new.row] = new.num_computed_tokens
            self._end[new.row] = new.max_total_tokens
            self._stop[new.row] = self._stop_at(new) if self._stop_at else -1
            self._is_decoding[new.row] = False
        decoding = np.flatnonzero(self._is_decoding)
        assert len(decoding) == plan.num_decodes, "both ends count which rows decode"
        self.num_computed[decoding] += 1
        self.num_computed[plan.chunk_rows] += plan.chunk_lens
        rows = np.concatenate([decoding, plan.chunk_rows])
        self.num_context_tokens = int(self.num_computed[rows].sum())
        sampled = rows[self.num_computed[rows] == self._num_known[rows]]
        token_ids = self._tokens(sampled)
        self._num_known[sampled] += 1
        num_known = self._num_known[sampled]
        self._is_decoding[sampled] = num_known < self._end[sampled]
        return Result(
            plan.step_id,
            sampled.astype(np.int32),
            token_ids,
            sampled[num_known == self._stop[sampled]].astype(np.int32),
            ints([]),
            stored_disk_block_ids=plan.disk_store_dst_block_ids,
            loaded_host_block_ids=plan.disk_load_dst_block_ids,
        )

    def _tokens(self, rows: npt.NDArray[np.int64]) -> Int32Array:
        if self._draw is None:
            return np.zeros(len(rows), np.int32)
        known = self._num_known[rows].tolist()
        pairs = zip(rows.tolist(), known, strict=True)
        return ints([self._draw(self.sequences[row], index) for row, index in pairs])
