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
        self._blocks: list[int] = []
        self._hashes: list[BlockHash] = []
        self._num_before = 0
        """Those that hold before the step being planned."""

    def give(self, block: int, block_hash: BlockHash) -> None:
        """Name what a block holds, or will when the step being planned is done."""
        self._blocks.append(block)
        self._hashes.append(block_hash)

    def begin_step(self) -> None:
        """Note that a step begins to move blocks, and to compute."""
        self._num_before = len(self._blocks)

    def exchange(self, one: int, other: int) -> None:
        """Follow two blocks that change places in the step being planned."""
        names = {one: other, other: one}
        for index in range(self._num_before, len(self._blocks)):
            block = self._blocks[index]
            self._blocks[index] = names.get(block, block)

    def forget(self, blocks: set[int]) -> None:
        """Name none of these: their content is not to be trusted."""
        kept = [index for index, block in enumerate(self._blocks) if block not in blocks]
        self._num_before = sum(index < self._num_before for index in kept)
        self._blocks = [self._blocks[index] for index in kept]
        self._hashes = [self._hashes[index] for index in kept]

    def take(self) -> tuple[Int32Array, npt.NDArray[np.uint8]]:
        """Return int32[N] blocks and uint8[N, 32] labels for the plan that goes out."""
        count, self._num_before = self._num_before, 0
        blocks, labels = ints(self._blocks[:count]), b"".join(self._hashes[:count])
        del self._blocks[:count], self._hashes[:count]
        return blocks, np.frombuffer(labels, np.uint8).reshape(count, HASH_BYTES)
