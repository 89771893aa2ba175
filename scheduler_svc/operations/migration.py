"""Moves live requests with their KV between workers: for operators, for balance, and to drain.

A request is always live at exactly one core: when its KV has been copied, it leaves the source core
and joins the target core in a single turn of the event loop. If anything fails before this turn,
the request continues at the source worker. If the source worker is lost, the request continues at
another worker, like all requests of a lost worker.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import structlog
from prometheus_client import Counter

from contract.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    QuireError,
    UnavailableError,
)
from rpc.tasks import BackgroundTasks
from scheduler_svc.core.handover.moved_request import Export, Import, MovableRequest
from scheduler_svc.core.interface.config import SchedulerLoad
from scheduler_svc.core.interface.errors import MigrationRefusedError
from scheduler_svc.workers.engine import Engine
from scheduler_svc.workers.fleet import Fleet
from scheduler_svc.workers.kv.copy import check_exchange, has_answered, keeps_kv
from scheduler_svc.workers.roster import Roster
from scheduler_svc.workers.session import Session

_REBALANCE_S: Final = 0.25
"""How often to look for a worker with room for a request that waits at another worker."""
_PAUSE_S: Final = 5.0
"""How long rebalancing pauses after a failed move."""
_MAX_MOVES: Final = 4
"""The limit on concurrent moves from a draining worker. Each move copies KV over the network, and
needs host blocks at the source and at the target."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Migration:
    """The result of a move."""

    from_worker: str
    num_seqs: int
    """Number of the request's sequences that arrived. Its other sequences ended during the move."""
    num_blocks: int
    """Number of blocks whose contents were copied."""
    was_there: bool = False
    """Whether the request was at the target already, so that nothing moved."""


class Migrator:
    """Moves live requests from one worker to another."""

    def __init__(self, roster: Roster, migrations: Counter) -> None:
        """`migrations` counts moves by source, target and outcome."""
        self._roster = roster
        self._migrations = migrations
        self._moves = BackgroundTasks()

    async def migrate(self, request_id: str, worker: str) -> Migration:
        """Move a live request to a worker. The move continues if the caller is cancelled.

        Raises:
            NotFoundError: There is no such request, or no such worker.
            InvalidArgumentError: Several live requests have this id.
            FailedPreconditionError: The request cannot be moved.
            UnavailableError: A worker is lost.
        """
        target = self._roster.engine(worker)
        found = [
            (engine, live)
            for engine in self._roster.engines
            if engine.session is not None
            for live in engine.session.call(lambda core: core.moves.find_requests(request_id))
        ]
        if not found:
            raise NotFoundError(f"request {request_id!r} is not live at any worker")
        if len(found) > 1:
            raise InvalidArgumentError(
                "request_id", f"is {request_id!r}, which {len(found)} live requests have"
            )
        ((source, live),) = found
        if source is target:
            return Migration(source.target, live.num_seqs, 0, was_there=True)
        return await self.move(live, source, target)

    async def move(self, live: MovableRequest, source: Engine, target: Engine) -> Migration:
        """Move a live request from `source` to `target`; raise the same errors as `migrate`."""
        return await self._moves.run(self.run(live, source, target))

    async def rebalance(self) -> None:
        """Move requests that wait with their KV on the host, each to a worker with room.

        This continues until it is cancelled.
        """
        while True:
            await asyncio.sleep(_REBALANCE_S)
            if not self._moves.is_busy and (choice := self._find_imbalance()) is not None:
                try:
                    await self.move(*choice)
                except QuireError:  # `run` has logged it
                    await asyncio.sleep(_PAUSE_S)

    def stop(self) -> None:
        """Cancel the moves in progress; called when the sessions end."""
        self._moves.stop()

    # --- one move -------------------------------------------------------------------------------

    async def run(self, live: MovableRequest, source: Engine, target: Engine) -> Migration:
        """Do what `move` does, but cancel the move if the caller is cancelled.

        Room at the target is reserved before the first `await`. So between the caller's check for
        room and the reservation, no other task can run and take the room.
        """
        who = {"request_id": live.request_id, "source": source.target, "target": target.target}
        started = time.perf_counter()
        try:
            moved = await self._move(live, source, target)
        except QuireError as error:
            self._count(source, target, "failed")
            log.warning("a request could not be moved", **who, reason=str(error))
            raise
        self._count(source, target, "arrived" if moved.num_seqs else "ended")
        seconds = round(time.perf_counter() - started, 3)
        log.info("a request has moved", **who, num_blocks=moved.num_blocks, seconds=seconds)
        return moved

    async def _move(self, live: MovableRequest, source: Engine, target: Engine) -> Migration:
        giving, taking = source.attached_session(), target.attached_session()
        check_exchange(giving, taking)
        with _refusals(live):
            export = giving.call(lambda core: core.begin_export(live.source, live.first_seq_key))
        room = None
        try:
            with _refusals(live):
                room = taking.call(lambda core: core.begin_import(export.moved))
            await giving.wait_until(has_answered(export.ready_step))
            await taking.wait_until(has_answered(room.ready_step))
            sources, targets = export.moved.host_block_ids, room.host_block_ids
            if sources:
                instance_id = giving.info.instance_id
                await taking.link.pull_kv(source.target, instance_id, sources, targets)
            giving.check_alive()
            taking.check_alive()
        except QuireError:
            _go_back(giving, export, taking, room)
            raise
        num_arrived = _hand_over(giving, export, taking, room)
        return Migration(source.target, num_arrived, len(sources))

    def switch(
        self, live: MovableRequest, source: Engine, target: Engine, receive: Callable[[], None]
    ) -> None:
        """Move a request in one turn of the event loop; its blocks are at the target already.

        When the target core has made room for the request, this method calls `receive`, which lets
        the target core find the copied blocks.

        Raises:
            FailedPreconditionError: The request cannot be moved.
            UnavailableError: A worker is lost.
        """
        giving, taking = source.attached_session(), target.attached_session()
        check_exchange(giving, taking)
        taking.check_alive()
        with _refusals(live):
            export = giving.call(
                lambda core: core.begin_export(live.source, live.first_seq_key, keeps_kv=False)
            )
        try:
            with _refusals(live):
                room = taking.call(lambda core: core.begin_import(export.moved))
            receive()
        except QuireError:
            _go_back(giving, export, taking, None)
            self._count(source, target, "failed")
            raise
        num_arrived = _hand_over(giving, export, taking, room)
        self._count(source, target, "arrived" if num_arrived else "ended")

    def _count(self, source: Engine, target: Engine, end: str) -> None:
        self._migrations.labels(source.target, target.target, end).inc()

    # --- balance --------------------------------------------------------------------------------

    def _find_imbalance(self) -> tuple[MovableRequest, Engine, Engine] | None:
        """Find a request that waits with its KV on the host, and a worker with room for it.

        Returns:
            The request, the engine of its worker, and the engine of the worker with room.
        """
        loads = [
            (engine, session, session.load())
            for engine in self._roster.engines
            if (session := engine.session) is not None
            and session.info.takes_kv
            and not session.is_draining
        ]
        targets = [
            (engine, load)
            for engine, _, load in loads
            if not load.num_waiting and not load.is_memory_short
        ]
        for source, session, load in loads:
            if not load.num_swapped or not targets:
                continue
            if (live := session.call(lambda core: core.moves.first_swapped())) is None:
                continue
            for target, room in sorted(targets, key=lambda pair: -_num_free_blocks(pair[1])):
                if _has_room(room, live) and _has_same_part(session, target):
                    return live, source, target
        return None


class Drainer:
    """Empties workers that are about to end or to unload their model.

    Requests move with their KV. If a request cannot move, for example because there are too few
    host blocks, it stays at the worker until all other requests have moved. After that, the request
    continues as after the loss of a worker: another worker computes its tokens again.
    """

    def __init__(self, fleet: Fleet, migrator: Migrator) -> None:
        self._fleet = fleet
        self._migrator = migrator

    async def run(self) -> None:
        """Until cancelled, empty and release each worker that announces that it is about to end."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                engine = await self._fleet.next_draining()
                if engine.session is not None:
                    tasks.create_task(self._empty(engine, engine.session))

    async def _empty(self, engine: Engine, session: Session) -> None:
        with contextlib.suppress(UnavailableError):  # the worker ended without waiting
            await self.move_away(engine, session)
            await session.let_go()
            log.info("a draining worker was released", worker=engine.target)

    async def move_away(self, engine: Engine, session: Session) -> None:
        """Move a worker's requests to other workers; return when all moves have ended or failed.

        Raises:
            UnavailableError: The worker is lost.
        """
        started = time.perf_counter()
        lives = session.call(lambda core: core.moves.find_requests())
        room = asyncio.Semaphore(_MAX_MOVES)
        are_moved = await asyncio.gather(*(self._move(live, engine, room) for live in lives))
        log.info(
            "a worker was emptied",
            worker=engine.target,
            num_requests=len(lives),
            num_moved=sum(are_moved),
            seconds=round(time.perf_counter() - started, 3),
        )

    async def _move(self, live: MovableRequest, source: Engine, room: asyncio.Semaphore) -> bool:
        async with room:
            target = self._find_target(source)
            if target is None:
                return False
            try:
                await self._migrator.move(live, source, target)
            except QuireError:  # the migrator has logged it
                return False
            return True

    def _find_target(self, source: Engine) -> Engine | None:
        """Find the best worker to which requests of `source` can move; None: there is none.

        A worker that can do the work of `source` (`_has_same_part`) is better than one that cannot.
        Among equally good workers, the one with the most room for KV is chosen.
        """
        giving = source.session
        if giving is None or not keeps_kv(giving):
            return None
        loads = [
            (_has_same_part(giving, engine), _num_free_blocks(session.load()), engine)
            for engine in self._fleet.roster.engines
            if (session := engine.session) is not None
            and keeps_kv(session)
            and not session.is_draining
        ]
        if not loads:
            return None
        return max(loads, key=lambda each: each[:2])[2]


def _has_same_part(session: Session, other: Engine) -> bool:
    """Whether `other` can do the work of the session's worker, by the roles of the two.

    If the session's worker decodes, `other` must decode, too. If the session's worker only
    prefills, `other` must prefill.
    """
    if other.session is None:
        return False
    role = other.session.role
    return role.decodes if session.role.decodes else role.prefills


def _num_free_blocks(load: SchedulerLoad) -> int:
    return load.num_free_blocks + load.num_cached_blocks


def _has_room(load: SchedulerLoad, live: MovableRequest) -> bool:
    """Whether a worker with the load `load` has room for a request that waits at another worker.

    There must be a row for each of the request's sequences, and host blocks for its KV. The device
    must have room for the request at its maximum length, and one more block for each running
    sequence. So the request can start at once and run to its end.
    """
    num_host_blocks = load.num_free_host_blocks + load.num_cached_host_blocks
    return (
        load.num_running + live.num_seqs <= load.max_num_seqs
        and live.max_device_blocks + load.num_running <= _num_free_blocks(load)
        and 0 < live.num_host_blocks <= num_host_blocks
    )


def _hand_over(giving: Session, export: Export, taking: Session, room: Import) -> int:
    """Move a request from the core of `giving` to that of `taking`.

    This function never awaits, so the request is always live at exactly one of the two cores.

    Returns:
        How many of the request's sequences arrived.
    """
    num_crashes = giving.crashes.take(export.moved.request)
    indices = giving.call(lambda core: core.end_export(export.export_id, leaves=True))
    taking.call(lambda core: core.end_import(room.import_id, indices))
    if indices:
        taking.crashes.set(export.moved.request, num_crashes)
    return len(indices)


@contextlib.contextmanager
def _refusals(live: MovableRequest) -> Iterator[None]:
    try:
        yield
    except MigrationRefusedError as error:
        raise FailedPreconditionError(
            f"request {live.request_id!r} cannot be moved: {error}"
        ) from None


def _go_back(giving: Session, export: Export, taking: Session, room: Import | None) -> None:
    """Give up a move: the request continues at `giving`, unless the worker of `giving` is lost."""
    with contextlib.suppress(UnavailableError):
        giving.call(lambda core: core.end_export(export.export_id, leaves=False))
    if room is not None:
        import_id = room.import_id
        with contextlib.suppress(UnavailableError):
            taking.call(lambda core: core.end_import(import_id, ()))
