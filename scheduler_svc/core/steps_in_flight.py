"""The steps that have no result yet, and the blocks and rows that they may still touch.

When a sequence stops, steps that were sent before may still write to its blocks and name its row.
So the last of these steps holds the sequence's blocks and row until the result of this step
arrives.
"""

from collections import deque
from collections.abc import Sequence

from contract.step import StepId
from scheduler_svc.core.interface.errors import BrokenInvariantError
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.space.blocks import BlockPool, DeviceBlockId


class StepsInFlight:
    """The steps in the order in which they were sent, and the blocks and rows that they hold."""

    def __init__(self, pool: BlockPool[DeviceBlockId], rows: Rows) -> None:
        self.last = StepId(0)
        """The step that was sent last."""
        self._pool = pool
        self._rows = rows
        self._unanswered: deque[StepId] = deque()
        self._held: deque[tuple[StepId, Sequence[DeviceBlockId], int | None]] = deque()

    def __len__(self) -> int:
        return len(self._unanswered)

    @property
    def last_answered(self) -> StepId:
        """The last step with a result; 0 if no step has one yet."""
        return StepId(self.last - len(self._unanswered))

    @property
    def held_blocks(self) -> list[DeviceBlockId]:
        """The blocks that steps hold; a block occurs once per reference."""
        return [block for _, blocks, _ in self._held for block in blocks]

    @property
    def held_rows(self) -> list[int]:
        return [row for _, _, row in self._held if row is not None]

    @property
    def hold_blocks(self) -> bool:
        """Whether the result of a step in flight may free blocks."""
        return bool(self._held)

    def send(self, step: StepId) -> None:
        """Record that `step` has been sent."""
        self.last = step
        self._unanswered.append(step)

    def hold(self, blocks: Sequence[DeviceBlockId], row: int | None = None) -> None:
        """Keep blocks and a row from being used again, until no step in flight can touch them.

        The caller gives up one reference to each of `blocks`. `row` must no longer have an owner
        (`Rows.abandon`). If no step is in flight, the blocks and the row are released at once.
        """
        self._held.append((self.last, blocks, row))
        if not self._unanswered:
            self._release(self.last)

    def answer(self, step: StepId) -> None:
        """Record the result of `step`; release the blocks and rows that no later step can touch.

        Raises:
            BrokenInvariantError: `step` is not the oldest step in flight.
        """
        if not self._unanswered or step != self._unanswered[0]:
            raise BrokenInvariantError(
                f"result of step {step}; in flight: {list(self._unanswered)}"
            )
        self._unanswered.popleft()
        self._release(step)

    def _release(self, step: StepId) -> None:
        while self._held and self._held[0][0] <= step:
            _, blocks, row = self._held.popleft()
            self._pool.drop(blocks)
            if row is not None:
                self._rows.give_back(row)
