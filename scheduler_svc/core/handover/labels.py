"""Labels: hashes of device blocks' contents that the worker has not been sent yet, in order.

A worker keeps, beside each block, the hash of its content, for the next scheduler to find. The
labels of a plan name what blocks hold *before* its step changes anything. A block that is named
while a step is being planned may be computed by that very step, so its label goes with the next.
"""

from collections.abc import Iterable
from itertools import compress

import numpy as np
import numpy.typing as npt

from contract.arrays import Int32Array, ints
from contract.hashing import HASH_BYTES, BlockHash


class NewLabels:
    """Gathers labels of the device pool for the plans to come."""

    def __init__(self) -> None:
        # Parallel.
        self._blocks: list[int] = []
        self._hashes: list[BlockHash] = []
        self._num_before = 0
        """How many of them hold before the step being planned."""

    def give(self, blocks: Iterable[int], hashes: Iterable[BlockHash]) -> None:
        """Name what blocks hold, or will when the step being planned is done."""
        self._blocks += blocks
        self._hashes += hashes

    def begin_step(self) -> None:
        """Begin a step: what is named from now on holds only after it."""
        self._num_before = len(self._blocks)

    def exchange(self, one: int, other: int) -> None:
        """Follow two blocks that change places in the step being planned."""
        names = {one: other, other: one}
        new = self._blocks[self._num_before :]
        self._blocks[self._num_before :] = [names.get(block, block) for block in new]

    def forget(self, blocks: set[int]) -> None:
        """Name none of these: their content is not to be trusted."""
        is_kept = [block not in blocks for block in self._blocks]
        self._num_before = sum(is_kept[: self._num_before])
        self._blocks = [*compress(self._blocks, is_kept)]
        self._hashes = [*compress(self._hashes, is_kept)]

    def take(self) -> tuple[Int32Array, npt.NDArray[np.uint8]]:
        """Return int32[N] blocks and uint8[N, 32] labels for the plan that goes out."""
        count, self._num_before = self._num_before, 0
        if not count:
            return NOTHING
        blocks, hashes = self._blocks[:count], self._hashes[:count]
        del self._blocks[:count], self._hashes[:count]
        labels = np.frombuffer(b"".join(hashes), np.uint8).reshape(count, HASH_BYTES)
        return ints(blocks), labels


NOTHING = ints(()), np.empty((0, HASH_BYTES), np.uint8)
"""No labels."""
