"""Measures how scattered a pool's available blocks are, and how full its held blocks are.

Allocation needs no adjacent blocks. But scattered blocks make transfers longer, and keep the end of
the pool from being given back.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from contract.arrays import Int32Array

_MEDIUM, _HIGH = 0.2, 0.5


class FragmentationLevel(StrEnum):
    """The fragmentation rate in words: LOW < 0.2 <= MEDIUM < 0.5 <= HIGH."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """How scattered a pool's available blocks are; here "free" includes cached blocks."""

    num_free_blocks: int
    longest_free_run: int
    """Length of the longest run of adjacent free blocks."""

    @property
    def rate(self) -> float:
        """The share of the free blocks that is not in the longest run; 0 if no block is free."""
        if not self.num_free_blocks:
            return 0.0
        return (self.num_free_blocks - self.longest_free_run) / self.num_free_blocks

    @property
    def level(self) -> FragmentationLevel:
        if self.rate < _MEDIUM:
            return FragmentationLevel.LOW
        return FragmentationLevel.MEDIUM if self.rate < _HIGH else FragmentationLevel.HIGH


@dataclass(frozen=True, slots=True)
class SpaceReport:
    """How well a core uses its device and host blocks."""

    device: Fragmentation
    host: Fragmentation
    num_slots_held: int
    """Token slots in running sequences' block tables; a shared block counts once per table."""
    num_slots_written: int
    """How many of the held slots have KV; slots that decodes in flight write do not count."""

    @property
    def occupancy(self) -> float:
        """The share of held slots that have KV; 1 if nothing runs."""
        return self.num_slots_written / self.num_slots_held if self.num_slots_held else 1.0


def measure(ref_counts: Int32Array) -> Fragmentation:
    """Measure a pool; `ref_counts`, int32[N], is the number of holders of each block."""
    held = np.flatnonzero(ref_counts)
    ends = np.concatenate(([-1], held, [len(ref_counts)]))
    return Fragmentation(
        num_free_blocks=len(ref_counts) - len(held),
        longest_free_run=int(np.diff(ends).max()) - 1,
    )
