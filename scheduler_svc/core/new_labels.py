"""The names of device blocks' contents that the worker has not been told: label by label, in order.

A worker keeps, beside each block, the hash of what it holds, for the next scheduler to find. The
labels of a plan name what blocks hold *before* its step changes anything. What is named while a
step is being planned may be computed by that very step, so it is told with the one after it.
"""

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.block_hash import HASH_BYTES, BlockHash
from scheduler_svc.core.plan import Int32Array, ints


class NewLabels:
    """Gathers the labels of all plans; the device pool's."""

    def __init__(self) -> None:
        self._named: list[tuple[int, BlockHash]] = []
        self.give = self._named.append
        """`give((block, block_hash))` names what a block holds, or will when the step being planned
        is done. Once for each border that a sequence crosses: no call of ours is between."""
        self._num_before = 0
        """Those that hold before the step being planned."""

    def begin_step(self) -> None:
        """Note that a step begins to move blocks, and to compute."""
        self._num_before = len(self._named)

    def exchange(self, one: int, other: int) -> None:
        """Follow two blocks that change places in the step being planned."""
        names = {one: other, other: one}
        for index in range(self._num_before, len(self._named)):
            block, block_hash = self._named[index]
            self._named[index] = names.get(block, block), block_hash

    def forget(self, blocks: set[int]) -> None:
        """Name none of these: their content is not to be trusted."""
        before = [item for item in self._named[: self._num_before] if item[0] not in blocks]
        after = [item for item in self._named[self._num_before :] if item[0] not in blocks]
        self._named[:], self._num_before = before + after, len(before)

    def take(self) -> tuple[Int32Array, npt.NDArray[np.uint8]]:
        """Return int32[N] blocks and uint8[N, 32] labels for the plan that goes out."""
        count, self._num_before = self._num_before, 0
        if not count:
            return NOTHING
        blocks, hashes = zip(*self._named[:count], strict=True)
        del self._named[:count]
        labels = np.frombuffer(b"".join(hashes), np.uint8).reshape(count, HASH_BYTES)
        return ints(blocks), labels


NOTHING = ints(()), np.empty((0, HASH_BYTES), np.uint8)
"""No labels."""
