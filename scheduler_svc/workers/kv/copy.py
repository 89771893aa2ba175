"""Copies blocks from one worker's prefix cache to another's, through the host memory of both."""

import contextlib
from collections.abc import Sequence
from functools import partial

from contract.errors import FailedPreconditionError, UnavailableError
from contract.hashing import BlockHash
from contract.step import StepId
from scheduler_svc.core.handover.copies import RoomId
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.workers.session import Condition, Session


class KvCopy:
    """Copies the blocks of one request from the worker `giving` to the worker `taking`.

    After `receive`, the prefix cache of `taking` has the blocks.
    """

    def __init__(self, source_target: str, giving: Session, taking: Session) -> None:
        self.giving, self.taking = giving, taking
        self.num_reserved = 0
        """Number of host blocks that are reserved at `taking`."""
        self._source_target = source_target
        self._rooms: dict[RoomId, int] = {}  # with the number of blocks that have arrived
        self._there: set[BlockHash] = set()

    def num_missing(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many of the blocks are still missing at `taking`, as far as `extend` knows."""
        return sum(each not in self._there for each in hashes)

    async def extend(self, hashes: Sequence[BlockHash]) -> bool:
        """Copy some of the blocks that `taking` lacks.

        Returns:
            Whether this call copied at least one of the blocks, or found one at `taking`.

        Raises:
            UnavailableError: A worker is lost, or the copy has failed.
        """
        new = [each for each in hashes if each not in self._there]
        missing = self.taking.call(lambda core: core.copies.missing(new)) if new else []
        there = {*new}.difference(missing)
        if missing:
            there.update(await self._copy(missing))
        self._there |= there
        return bool(there)

    async def _copy(self, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Copy as many of the first blocks of `hashes` as the two workers can copy now.

        Return the hashes of the copied blocks.
        """
        most = self.taking.call(lambda core: core.copies.num_expectable)
        loan = self.giving.call(lambda core: core.lend(hashes[:most]))
        try:
            if not loan.hashes:
                return ()
            room = self.taking.call(lambda core: core.expect(loan.hashes))
            self._rooms[room.room_id] = 0
            self.num_reserved += len(room.hashes)
            await self.giving.wait_until(has_answered(loan.ready_step))
            await self.taking.wait_until(has_answered(room.ready_step))
            await self.taking.link.pull_kv(
                self._source_target,
                self.giving.info.instance_id,
                loan.host_block_ids,
                room.host_block_ids,
            )
            self.giving.check_alive()
            self._rooms[room.room_id] = len(room.hashes)
            return room.hashes
        finally:
            with contextlib.suppress(UnavailableError):
                self.giving.call(lambda core: core.end_loan(loan.loan_id))

    def receive(self) -> None:
        """Publish the blocks that have arrived at `taking`.

        Raises:
            UnavailableError: The worker `taking` is lost.
        """
        for room_id, num_arrived in self._rooms.items():
            self.taking.call(partial(_receive, room_id, num_arrived))
        self._rooms.clear()

    def give_up(self) -> None:
        """Free the reserved blocks; do nothing after `receive`."""
        with contextlib.suppress(UnavailableError):
            for room_id in self._rooms:
                self.taking.call(partial(_receive, room_id, 0))
        self._rooms.clear()


def _receive(room_id: RoomId, num_arrived: int, core: Scheduler) -> None:
    core.receive(room_id, num_arrived)


def has_answered(step: StepId) -> Condition:
    """Return the condition that a core has applied the result of `step`."""
    return lambda core: core.steps.last_answered >= step


def check_exchange(giving: Session, taking: Session) -> None:
    """Check the conditions of a KV exchange that the two workers' cores cannot check.

    Raises:
        FailedPreconditionError: The workers cannot exchange KV.
    """
    if taking.is_draining:
        raise FailedPreconditionError(f"worker {taking.info.worker_id} is draining")
    for session, verb in ((giving, "give"), (taking, "take")):
        if not session.info.takes_kv:
            raise FailedPreconditionError(
                f"worker {session.info.worker_id} cannot {verb} KV (takes_kv is false)"
            )
    if giving.info.dtype != taking.info.dtype:
        raise FailedPreconditionError(
            f"dtype is {giving.info.dtype} here and {taking.info.dtype} at that worker"
        )


def keeps_kv(session: Session) -> bool:
    """Whether a worker can exchange KV with other workers."""
    return session.info.takes_kv and session.info.limits.num_host_blocks > 0
