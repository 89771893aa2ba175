"""Collects labels, which are hashes of device blocks' contents, for the plans that send them.

A worker stores the hash of each block's content, for the next scheduler. The labels of a plan refer
to the contents *before* the plan's step. A block that is published while a step is being planned
may be computed only by that step, so its label is sent with the next plan.
"""

from collections.abc import Iterable
from itertools import compress

import numpy as np
import numpy.typing as npt

from contract.arrays import Int32Array, ints
from contract.hashing import HASH_BYTES, BlockHash


class NewLabels:
    """Collects labels of device blocks for the next plans."""

    def __init__(self) -> None:
        # These two lists are parallel.
        self._blocks: list[int] = []
        self._hashes: list[BlockHash] = []
        self._num_before = 0
        """Number of labels, from the first on, that are valid before the step being planned."""

    def give(self, blocks: Iterable[int], hashes: Iterable[BlockHash]) -> None:
        """Add labels of blocks that are computed at the latest by the step being planned."""
        self._blocks += blocks
        self._hashes += hashes

    def begin_step(self) -> None:
        """Begin to plan a step; labels added from now on are valid only after this step."""
        self._num_before = len(self._blocks)

    def exchange(self, one: int, other: int) -> None:
        """Exchange two blocks in the labels that are valid only after the step being planned.

        That step exchanges the contents of the two blocks.
        """
        names = {one: other, other: one}
        new = self._blocks[self._num_before :]
        self._blocks[self._num_before :] = [names.get(block, block) for block in new]

    def forget(self, blocks: set[int]) -> None:
        """Drop the labels of `blocks`, which leave the pool or whose content may be wrong."""
        is_kept = [block not in blocks for block in self._blocks]
        self._num_before = sum(is_kept[: self._num_before])
        self._blocks = [*compress(self._blocks, is_kept)]
        self._hashes = [*compress(self._hashes, is_kept)]

    def take(self) -> tuple[Int32Array, npt.NDArray[np.uint8]]:
        """Return int32[N] blocks and uint8[N, 32] labels for the plan being sent."""
        count, self._num_before = self._num_before, 0
        if not count:
            return NOTHING
        blocks, hashes = self._blocks[:count], self._hashes[:count]
        del self._blocks[:count], self._hashes[:count]
        labels = np.frombuffer(b"".join(hashes), np.uint8).reshape(count, HASH_BYTES)
        return ints(blocks), labels


NOTHING = ints(()), np.empty((0, HASH_BYTES), np.uint8)
"""No labels."""
