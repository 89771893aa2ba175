"""The sequences that wait for admission, in order."""

from heapq import heappop, heappush

from scheduler_svc.core.request import SeqId
from scheduler_svc.core.sequence import Sequence


class WaitingQueue:
    """A heap by `Sequence.order`; removal marks, and the mark is collected at the head."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, SeqId], Sequence]] = []
        self._waiting: set[SeqId] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.seq_id in self._waiting

    def push(self, seq: Sequence) -> None:
        """Add a sequence."""
        self._waiting.add(seq.seq_id)
        heappush(self._heap, (seq.order, seq))

    def remove(self, seq: Sequence) -> None:
        """Take a waiting sequence out, wherever it is."""
        self._waiting.remove(seq.seq_id)

    def peek(self) -> Sequence | None:
        """Return the first in order; it stays."""
        while self._heap and self._heap[0][1].seq_id not in self._waiting:
            heappop(self._heap)
        return self._heap[0][1] if self._heap else None
