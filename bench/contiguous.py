"""The allocator that paging replaces: each request gets one run of token slots, first fit."""

from bisect import bisect


class FirstFit:
    """Runs of `num_slots` slots in a row."""

    def __init__(self, num_slots: int) -> None:
        self._free = [(0, num_slots)]
        """(start, length), ascending; no two touch."""

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return sum(length for _, length in self._free)

    @property
    def longest_free(self) -> int:
        """Slots of the longest run that nobody holds."""
        return max((length for _, length in self._free), default=0)

    def take(self, num_slots: int) -> int | None:
        """Return the start of the first free run that is long enough, now held; None: no run is."""
        for index, (start, length) in enumerate(self._free):
            if length >= num_slots:
                rest = (start + num_slots, length - num_slots)
                self._free[index : index + 1] = [rest] if rest[1] else []
                return start
        return None

    def give_back(self, start: int, num_slots: int) -> None:
        """Free a held run."""
        index = bisect(self._free, (start, 0))
        first, end = index, start + num_slots
        if index and sum(self._free[index - 1]) == start:
            first, start = index - 1, self._free[index - 1][0]
        if index < len(self._free) and self._free[index][0] == end:
            end = sum(self._free[index])
            index += 1
        self._free[first:index] = [(start, end - start)]
