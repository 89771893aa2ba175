"""Copies cached blocks from one core's worker to another's, ahead of the requests that need them.

Only full blocks are copied, each identified by its hash. The contents go through the host blocks of
both workers. The caller copies the contents, and calls both cores in this order:

    source core                              target core

                                             missing, num_expectable
    lend    the blocks are on the host,
            or go there with the next plan
                                             expect    host blocks are reserved for those lent
            after the results of both `ready_step`s the contents are copied
    end_loan                                 receive   the blocks can be found from now on

For the duration of the copy, a loan holds the blocks that are read, and a reservation (a `Room`)
holds the blocks that are written. Before `receive`, no sequence finds a copied block. If the copy
fails, or KV arrives damaged, `receive` only frees the blocks, so damaged KV is never used.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NewType

from contract.hashing import BlockHash
from contract.step import StepId
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.space.blocks import BlockPool, DeviceBlockId, HostBlockId
from scheduler_svc.core.steps_in_flight import StepsInFlight
from scheduler_svc.core.tiers.host_tier import HostTier

LoanId = NewType("LoanId", int)
"""Identifies a loan at the source core: blocks that are being read."""

RoomId = NewType("RoomId", int)
"""Identifies a reservation at the target core: blocks that are being written."""


@dataclass(frozen=True, slots=True)
class Loan:
    """Blocks that can be read as soon as they are on the host."""

    loan_id: LoanId
    hashes: tuple[BlockHash, ...]
    host_block_ids: tuple[HostBlockId, ...]
    """Parallel to `hashes`."""
    ready_step: StepId
    """The host blocks have the KV as soon as the result of this step has arrived."""


@dataclass(frozen=True, slots=True)
class Room:
    """Host blocks reserved for blocks from another core."""

    room_id: RoomId
    hashes: tuple[BlockHash, ...]
    host_block_ids: tuple[HostBlockId, ...]
    """Parallel to `hashes`."""
    ready_step: StepId
    """The copy may write these blocks as soon as the result of this step has arrived, because then
    no step in flight uses them."""


class Copies:
    """The loans and reservations in progress."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        pool: BlockPool[DeviceBlockId],
        tier: HostTier,
        steps: StepsInFlight,
    ) -> None:
        self._max_copied = config.max_swap_blocks
        self._pool = pool
        self._tier = tier
        self._steps = steps
        self._loans: dict[LoanId, Loan] = {}
        self._rooms: dict[RoomId, Room] = {}
        self._ids = count(1)

    # --- source core ----------------------------------------------------------------------------

    def lend(self, hashes: Sequence[BlockHash]) -> Loan:
        """Hold host blocks with these hashes, so that the caller can read them.

        A block that only the device has is copied to the host first. The loan has only the
        blocks before the first block that neither pool has or that cannot be copied. A block cannot
        be copied if the host has no room, or if the loan has copied `max_swap_blocks` blocks
        already. While swap-ins are pending, no block is copied: a step copies in one direction
        only, so a copy to the host would delay the sequences that wait for the swap-ins.
        """
        num_left = 0 if self._tier.has_unsent_swap_ins else self._max_copied
        held: list[HostBlockId] = []
        for block_hash in hashes:
            if found := self._tier.pool.find([block_hash]):
                self._tier.pool.share(found)
            else:
                on_device = self._pool.find([block_hash])
                if not (on_device and num_left and self._tier.pool.num_available):
                    break
                num_left -= 1
                found = self._tier.swap_out(on_device, [block_hash])
            held += found
        lent = tuple(hashes[: len(held)])
        loan = Loan(LoanId(next(self._ids)), lent, tuple(held), self._step_of_last_move)
        self._loans[loan.loan_id] = loan
        return loan

    def end_loan(self, loan_id: LoanId) -> None:
        """Release the blocks of a loan, which are no longer read."""
        self._tier.pool.drop(self._loans.pop(loan_id).host_block_ids)

    # --- target core ----------------------------------------------------------------------------

    def missing(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Return those of `hashes` that neither the device nor the host has; reserve no block."""
        pools = (self._pool, self._tier.pool)
        return [each for each in hashes if not any(pool.find([each]) for pool in pools)]

    @property
    def num_expectable(self) -> int:
        """How many host blocks `expect` can reserve now: half of the available ones."""
        return self._tier.pool.num_available // 2

    def expect(self, hashes: Sequence[BlockHash]) -> Room:
        """Reserve host blocks for the first `num_expectable` of `hashes`.

        `missing` must have returned these hashes.
        """
        taken = tuple(hashes[: self.num_expectable])
        blocks = tuple(self._tier.take_free() for _ in taken)
        room = Room(RoomId(next(self._ids)), taken, blocks, self._step_of_last_move)
        self._rooms[room.room_id] = room
        return room

    def receive(self, room_id: RoomId, num_arrived: int) -> None:
        """Publish the first `num_arrived` blocks of a reservation, and free the others."""
        room = self._rooms.pop(room_id)
        blocks, hashes = room.host_block_ids[:num_arrived], room.hashes[:num_arrived]
        self._tier.pool.publish(blocks, hashes)
        self._tier.pool.drop(room.host_block_ids)

    # --- parts ----------------------------------------------------------------------------------

    @property
    def held_host_blocks(self) -> Iterator[HostBlockId]:
        """The host blocks that copies hold; a block occurs once per reference."""
        for loan in self._loans.values():
            yield from loan.host_block_ids
        for room in self._rooms.values():
            yield from room.host_block_ids

    @property
    def _step_of_last_move(self) -> StepId:
        """The step whose result says that all block moves requested so far are done."""
        last = self._steps.last
        return StepId(last + 1) if self._tier.has_moves else last
