"""Models when moves between host and disk end. In each direction, moves run one at a time."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from contract.arrays import Int32Array


@dataclass(slots=True)
class _Channel:
    """Moves in one direction; each starts when the previous one has ended."""

    free_at_s: float = 0.0
    ends: deque[tuple[float, int, int]] = field(default_factory=deque)
    """(end time, step, target block) of each move not yet reported; times and steps ascend."""

    def start(self, blocks: Int32Array, step_id: int, block_s: float, now_s: float) -> None:
        for block in blocks.tolist():
            self.free_at_s = max(self.free_at_s, now_s) + block_s
            self.ends.append((self.free_at_s, step_id, block))

    def pop_ended(self, step_id: int, now_s: float) -> Int32Array:
        ended = []
        while self.ends and self.ends[0][0] <= now_s and self.ends[0][1] <= step_id:
            ended.append(self.ends.popleft()[2])
        return np.array(ended, np.int32)


class DiskMoves:
    """The disk of a simulated worker. Times are in seconds, on the caller's clock."""

    def __init__(self, block_s: float) -> None:
        """`block_s` is the time that the disk takes for one block."""
        self._block_s = block_s
        self._stores, self._loads = _Channel(), _Channel()

    def store(self, disk_blocks: Int32Array, step_id: int, now_s: float) -> None:
        self._stores.start(disk_blocks, step_id, self._block_s, now_s)

    def load(self, host_blocks: Int32Array, step_id: int, now_s: float) -> None:
        self._loads.start(host_blocks, step_id, self._block_s, now_s)

    def next_end_s(self, step_id: int) -> float | None:
        """Return when the next move of steps up to `step_id` ends; None if all are reported."""
        firsts = [channel.ends[0] for channel in (self._stores, self._loads) if channel.ends]
        return min((end_s for end_s, step, _ in firsts if step <= step_id), default=None)

    def take_stored(self, step_id: int, now_s: float) -> Int32Array:
        """Return disk blocks of newly ended stores that steps up to `step_id` have started."""
        return self._stores.pop_ended(step_id, now_s)

    def take_loaded(self, step_id: int, now_s: float) -> Int32Array:
        """Return host blocks of newly ended loads that steps up to `step_id` have started."""
        return self._loads.pop_ended(step_id, now_s)
