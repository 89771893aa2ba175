"""A heap of sequences from whose middle they can be taken: removal marks, and marks are collected.

Adding and removing cost O(log n), amortized.
"""

from heapq import heapify, heappop, heappush

from scheduler_svc.core.policies.policy import Key
from scheduler_svc.core.request import SeqId
from scheduler_svc.core.sequence import Sequence

_FEW_MARKS = 16


class MarkedHeap:
    """Sequences by key, smallest first; among equals by number."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, SeqId, int, Sequence]] = []
        self._entries: dict[SeqId, int] = {}
        """The number of each sequence's entry; entries of other numbers are marked."""
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, key: Key, seq: Sequence) -> None:
        """Add a sequence that is not in the heap."""
        self._num_pushed += 1
        self._entries[seq.seq_id] = self._num_pushed
        heappush(self._heap, (key, seq.seq_id, self._num_pushed, seq))

    def discard(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it is, if it is in the heap."""
        if self._entries.pop(seq.seq_id, None) is None:
            return
        if len(self._heap) > 2 * len(self._entries) + _FEW_MARKS:
            self._heap = [e for e in self._heap if self._entries.get(e[1]) == e[2]]
            heapify(self._heap)
        while self._heap and self._entries.get(self._heap[0][1]) != self._heap[0][2]:
            heappop(self._heap)

    def first(self) -> tuple[Key, Sequence] | None:
        """Return the first and its key; it stays."""
        return (self._heap[0][0], self._heap[0][3]) if self._heap else None
