"""Tracks the contents of host and disk blocks, and which blocks may be used while blocks move.

Symbols: `P` block size.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from contract.arrays import Int32Array
from contract.errors import InconsistentPlanError
from contract.worker_limits import Limits

Slots = npt.NDArray[np.uint64]
"""uint64[N, P]: the digests in the slots of N blocks."""


class _BlockState(IntEnum):
    NOTHING = 0
    HOLDS = 1
    ARRIVING = 2
    """A disk move to the block has not ended."""


class TierLedger:
    """The host's and the disk's KV memory of a simulated worker."""

    def __init__(self, limits: Limits) -> None:
        self._host = np.zeros((limits.num_host_blocks, limits.block_size), np.uint64)
        self._disk = np.zeros((limits.num_disk_blocks, limits.block_size), np.uint64)
        self._host_states = np.zeros(limits.num_host_blocks, np.int8)
        self._disk_states = np.zeros(limits.num_disk_blocks, np.int8)
        self._disk_block_of = np.zeros(limits.num_host_blocks, np.int32)
        """The disk block that a host block is loaded from."""
        self._num_loads = np.zeros(limits.num_disk_blocks, np.int32)
        """Loads in progress from each disk block."""

    def clear(self) -> None:
        """Cancel all disk moves; contents that have not arrived are lost."""
        for states in (self._host_states, self._disk_states):
            states[states == _BlockState.ARRIVING] = _BlockState.NOTHING
        self._num_loads[:] = 0

    def swap_out(self, slots: Slots, host_blocks: Int32Array) -> None:
        """Store contents in int32[N] host blocks.

        Raises:
            InconsistentPlanError: A block may not be read or written now. The methods below raise
                it for the same reason.
        """
        _refuse(self._host_states, _BlockState.ARRIVING, host_blocks, "swapped out to host block")
        self._host[host_blocks] = slots
        self._host_states[host_blocks] = _BlockState.HOLDS

    def swap_in(self, host_blocks: Int32Array) -> Slots:
        """Return the contents of int32[N] host blocks."""
        _require_content(self._host_states, host_blocks, "swapped in from host block")
        slots: Slots = self._host[host_blocks]
        return slots

    def store(self, host_blocks: Int32Array, disk_blocks: Int32Array) -> None:
        """Start moving contents from int32[N] host to int32[N] disk blocks."""
        _require_content(self._host_states, host_blocks, "stored from host block")
        _refuse(self._disk_states, _BlockState.ARRIVING, disk_blocks, "stored in disk block")
        _refuse(self._num_loads > 0, True, disk_blocks, "stored in disk block")
        self._disk[disk_blocks] = self._host[host_blocks]
        self._disk_states[disk_blocks] = _BlockState.ARRIVING

    def load(self, disk_blocks: Int32Array, host_blocks: Int32Array) -> None:
        """Start moving contents from int32[N] disk to int32[N] host blocks."""
        _require_content(self._disk_states, disk_blocks, "loaded from disk block")
        _refuse(self._host_states, _BlockState.ARRIVING, host_blocks, "loaded to host block")
        self._host[host_blocks] = self._disk[disk_blocks]
        self._host_states[host_blocks] = _BlockState.ARRIVING
        self._disk_block_of[host_blocks] = disk_blocks
        np.add.at(self._num_loads, disk_blocks, 1)

    def end_stores(self, disk_blocks: Int32Array) -> None:
        """End the stores to int32[N] disk blocks."""
        self._disk_states[disk_blocks] = _BlockState.HOLDS

    def end_loads(self, host_blocks: Int32Array) -> None:
        """End the loads to int32[N] host blocks."""
        self._host_states[host_blocks] = _BlockState.HOLDS
        np.subtract.at(self._num_loads, self._disk_block_of[host_blocks], 1)


def _require_content(states: npt.NDArray[np.int8], blocks: Int32Array, move: str) -> None:
    _refuse(states, _BlockState.NOTHING, blocks, move, "holds nothing")
    _refuse(states, _BlockState.ARRIVING, blocks, move)


def _refuse(
    values: npt.NDArray[np.generic],
    bad: int,
    blocks: Int32Array,
    move: str,
    problem: str = "is being moved",
) -> None:
    wrong = values[blocks] == bad
    if wrong.any():
        raise InconsistentPlanError(f"KV is {move} {blocks[np.argmax(wrong)]}, which {problem}")
