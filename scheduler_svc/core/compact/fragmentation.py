"""Measures how scattered a pool's available blocks are, and how full the held ones.

A block of fixed size needs no neighbour to be allocated; what scatter costs is long transfers, and
a pool's tail that could be given back.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from contract.arrays import Int32Array

_MEDIUM, _HIGH = 0.2, 0.5


class FragmentationLevel(StrEnum):
    """The rate, for a person: LOW < 0.2 <= MEDIUM < 0.5 <= HIGH."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """How a pool's blocks that are not held lie; here they all are called free."""

    num_free_blocks: int
    longest_free_run: int
    """Neighbours that are all free."""

    @property
    def rate(self) -> float:
        """Share of the free blocks that is not in the longest run; 0 if none is free."""
        if not self.num_free_blocks:
            return 0.0
        return (self.num_free_blocks - self.longest_free_run) / self.num_free_blocks

    @property
    def level(self) -> FragmentationLevel:
        """The rate, in words."""
        if self.rate < _MEDIUM:
            return FragmentationLevel.LOW
        return FragmentationLevel.MEDIUM if self.rate < _HIGH else FragmentationLevel.HIGH


@dataclass(frozen=True, slots=True)
class SpaceReport:
    """How well a core's block space is used."""

    device: Fragmentation
    host: Fragmentation
    num_slots_held: int
    """Slots of the running sequences' block tables; a shared block counts for each."""
    num_slots_written: int
    """Slots with KV of a token, without decodes in flight."""

    @property
    def occupancy(self) -> float:
        """Slots written per slot held; 1 if nothing runs: nothing is wasted."""
        return self.num_slots_written / self.num_slots_held if self.num_slots_held else 1.0


def measure(ref_counts: Int32Array) -> Fragmentation:
    """Measure a pool, given as int32[N]: the number of holders of each block."""
    held = np.flatnonzero(ref_counts)
    ends = np.concatenate(([-1], held, [len(ref_counts)]))
    return Fragmentation(
        num_free_blocks=len(ref_counts) - len(held),
        longest_free_run=int(np.diff(ends).max()) - 1,
    )
