"""A heap from which any item can be removed; the entry of a removed item leaves the heap later.

Adding and removing cost O(log n), amortized.
"""

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from scheduler_svc.core.policies.policy import Key

_FEW_MARKS = 16

ItemT = TypeVar("ItemT", bound=Hashable)


class MarkedHeap(Generic[ItemT]):
    """Items ordered by key, smallest first; then by `tie`, and then by the order of arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, int, ItemT]] = []
        self._entries: dict[ItemT, int] = {}
        """Maps each item to the number that `push` gave to the item's heap entry. All other entries
        count as removed."""
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[ItemT]:
        return iter(self._entries)

    def push(self, key: Key, item: ItemT, tie: int = 0) -> None:
        """Add an item that is not in the heap."""
        self._num_pushed += 1
        self._entries[item] = self._num_pushed
        heappush(self._heap, (key, tie, self._num_pushed, item))

    def discard(self, item: ItemT) -> None:
        """Remove an item if it is in the heap."""
        self._entries.pop(item, None)
        if len(self._heap) > 2 * len(self._entries) + _FEW_MARKS:
            self._heap = [e for e in self._heap if self._entries.get(e[3]) == e[2]]
            heapify(self._heap)
        while self._heap and self._entries.get(self._heap[0][3]) != self._heap[0][2]:
            heappop(self._heap)

    def first(self) -> tuple[Key, ItemT] | None:
        """Return the smallest key and its item, without removing them."""
        return (self._heap[0][0], self._heap[0][3]) if self._heap else None
