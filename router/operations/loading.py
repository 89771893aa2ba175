"""Has the schedulers' workers unload their models and load them, for operators."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

import structlog

from contract.errors import NotFoundError, QuireError, UnavailableError
from router.domain import LoadProgress, UnloadedWorker
from router.schedulers.loading import SchedulerLoading
from router.schedulers.pool import Schedulers
from rpc.security.operators import Operators
from rpc.tasks import merged

log: Final = structlog.get_logger()


class Loading:
    """Every method takes the `peer` that calls, as `Operators.check` wants it, and raises as that.

    All schedulers are asked that are known: one none of whose workers has a model need not be
    connected. Methods raise also what they refuse: `NotFoundError` only if none that is there has
    such a worker; `UnavailableError` of one that was not connected, and may stand by, only if no
    other answers.
    """

    def __init__(
        self, schedulers: Schedulers, operators: Operators, calls: SchedulerLoading
    ) -> None:
        self._schedulers = schedulers
        self._operators = operators
        self._calls = calls

    async def unload(self, worker: str, peer: str) -> Sequence[UnloadedWorker]:
        """Have a worker, or all if that is empty, give their devices back."""
        self._operators.check(peer, "unloads models")
        log.info("told to unload models", worker=worker, peer=peer)
        targets = self._schedulers.target_to_is_connected
        ends = await asyncio.gather(*(self._unload(each, worker) for each in targets))
        unloaded = [worker for end in ends if not isinstance(end, QuireError) for worker in end]
        refusals: list[QuireError] = []
        for (target, is_connected), end in zip(targets.items(), ends, strict=True):
            if isinstance(end, QuireError):
                _pass_over(target, end, refusals, may_stand_by=not is_connected)
        _check_answered(refusals, len(targets))
        return unloaded

    async def load(self, worker: str, directory: str, peer: str) -> AsyncGenerator[LoadProgress]:
        """Have them take these again, with what is in a directory; tells how far that is."""
        self._operators.check(peer, "loads models")
        log.info("told to load models", worker=worker, directory=directory, peer=peer)
        targets = self._schedulers.target_to_is_connected
        refusals: list[QuireError] = []
        loads = merged(
            [
                self._load(target, worker, directory, refusals, may_stand_by=not is_connected)
                for target, is_connected in targets.items()
            ]
        )
        async with aclosing(loads):
            async for told in loads:
                yield told
        _check_answered(refusals, len(targets))

    async def _unload(self, target: str, worker: str) -> Sequence[UnloadedWorker] | QuireError:
        try:
            return await self._calls.unload(target, worker)
        except QuireError as error:
            return error

    async def _load(
        self,
        target: str,
        worker: str,
        directory: str,
        refusals: list[QuireError],
        *,
        may_stand_by: bool,
    ) -> AsyncGenerator[LoadProgress]:
        try:
            async with aclosing(self._calls.load(target, worker, directory)) as loading:
                async for told in loading:
                    may_stand_by = False  # it is there: what it says next counts
                    yield told
        except QuireError as error:
            _pass_over(target, error, refusals, may_stand_by=may_stand_by)


def _pass_over(
    target: str, error: QuireError, refusals: list[QuireError], *, may_stand_by: bool
) -> None:
    """Adds to `refusals` what another's answer makes up for; raises what none does."""
    if not isinstance(error, NotFoundError):
        if not (may_stand_by and isinstance(error, UnavailableError)):
            raise error
        log.warning("a scheduler was not asked", target=target, reason=str(error))
    refusals.append(error)


def _check_answered(refusals: Sequence[QuireError], num_asked: int) -> None:
    """Raises a refusal if there is nothing else, that of a scheduler that is there if one is."""
    if len(refusals) == num_asked:
        raise next((each for each in refusals if isinstance(each, NotFoundError)), refusals[0])
