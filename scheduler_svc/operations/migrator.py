"""Moves live requests with their KV between workers: when told to, and when one has room.

A request is always live at exactly one core: it leaves the one and comes to the other without
anything in between, when its KV is there. Whatever fails before that, it goes on where it was; and
if that worker is lost, elsewhere, as every request of a lost worker does.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
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
from contract.step import StepId
from rpc.tasks.shielded import Finishing
from scheduler_svc.core.config import SchedulerLoad
from scheduler_svc.core.errors import MigrationRefusedError
from scheduler_svc.core.handover.moved_request import Export, Import, LiveRequest
from scheduler_svc.workers.core_waits import Condition
from scheduler_svc.workers.engine import Engine
from scheduler_svc.workers.roster import Roster
from scheduler_svc.workers.session import Session

_REBALANCE_S: Final = 0.25
"""How often it is looked whether a worker has room for what waits at another."""
_PAUSE_S: Final = 5.0
"""How long nothing is moved by itself after that has failed."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Migration:
    """A request that has moved."""

    from_worker: str
    num_seqs: int
    """Sequences that arrived; the others ended on the way."""
    num_blocks: int
    """Blocks whose contents were moved."""
    was_there: bool = False
    """Whether there was nothing to do."""


class Migrator:
    """Takes requests from one session to another."""

    def __init__(self, roster: Roster, migrations: Counter) -> None:
        """`migrations` counts by source, target and end."""
        self._roster = roster
        self._migrations = migrations
        self._moves = Finishing()

    async def migrate(self, request_id: str, worker: str) -> Migration:
        """Move a live request; if the caller goes away meanwhile, it is moved nevertheless.

        Raises:
            NotFoundError: There is no such request, or no such worker.
            InvalidArgumentError: There are several such requests.
            FailedPreconditionError: It cannot be moved.
            UnavailableError: A worker is lost.
        """
        target = self._roster.engine(worker)
        found = [
            (engine, live)
            for engine in self._roster.engines
            if engine.session is not None
            for live in engine.session.call(lambda core: core.find_requests(request_id))
        ]
        if not found:
            raise NotFoundError(f"request {request_id!r} is not live at any worker")
        if len(found) > 1:
            raise InvalidArgumentError(
                "request_id", f"is {request_id!r}, as {len(found)} live requests are called"
            )
        ((source, live),) = found
        if source is target:
            return Migration(source.target, live.num_seqs, 0, was_there=True)
        return await self.move(live, source, target)

    async def move(self, live: LiveRequest, source: Engine, target: Engine) -> Migration:
        """Move a request of `source`; else as `migrate`."""
        return await self._moves.finish(self._run(live, source, target))

    async def rebalance(self) -> None:
        """Move what waits with its KV on the host to workers with room, until cancelled."""
        while True:
            await asyncio.sleep(_REBALANCE_S)
            if not self._moves.is_busy and (choice := self._find_imbalance()) is not None:
                try:
                    await self.move(*choice)
                except QuireError:  # it is in the log
                    await asyncio.sleep(_PAUSE_S)

    def stop(self) -> None:
        """Give up what is under way; the sessions end."""
        self._moves.stop()

    # --- one move -------------------------------------------------------------------------------

    async def _run(self, live: LiveRequest, source: Engine, target: Engine) -> Migration:
        """Move a request, and say in log and metrics how that went."""
        told = {"request_id": live.request_id, "source": source.target, "target": target.target}
        started = time.perf_counter()
        try:
            moved = await self._move(live, source, target)
        except QuireError as error:
            self._count(source, target, "failed")
            log.warning("a request could not be moved", **told, reason=str(error))
            raise
        self._count(source, target, "arrived" if moved.num_seqs else "ended")
        seconds = round(time.perf_counter() - started, 3)
        log.info("a request has moved", **told, num_blocks=moved.num_blocks, seconds=seconds)
        return moved

    async def _move(self, live: LiveRequest, source: Engine, target: Engine) -> Migration:
        giving, taking = _session(source), _session(target)
        _check_exchange(giving, taking)
        with _refusals(live):
            export = giving.call(lambda core: core.begin_export(live.source, live.first_seq_key))
        room = None
        try:
            with _refusals(live):
                room = taking.call(lambda core: core.begin_import(export.moved))
            await giving.until(_has_answered(export.ready_step))
            await taking.until(_has_answered(room.ready_step))
            sources, targets = export.moved.host_block_ids, room.host_block_ids
            if sources:
                await taking.pull_kv(source.target, giving.info.instance_id, sources, targets)
            giving.check_alive()
            taking.check_alive()
        except QuireError:
            _go_back(giving, export, taking, room)
            raise
        # No await from here on: what one core lets go, the other has.
        num_losses = giving.take_losses(export.moved.request)
        indices = giving.call(lambda core: core.end_export(export.export_id, leaves=True))
        taking.call(lambda core: core.end_import(room.import_id, indices))
        if indices:
            taking.note_losses(export.moved.request, num_losses)
        return Migration(source.target, len(indices), len(sources))

    def _count(self, source: Engine, target: Engine, end: str) -> None:
        self._migrations.labels(source.target, target.target, end).inc()

    # --- what to move ---------------------------------------------------------------------------

    def _find_imbalance(self) -> tuple[LiveRequest, Engine, Engine] | None:
        """Find a request that waits with its KV on the host, and a worker with room for it."""
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
            if (live := session.call(lambda core: core.first_swapped())) is None:
                continue
            for target, room in sorted(targets, key=lambda each: -_num_free_blocks(each[1])):
                if _has_room(room, live):
                    return live, source, target
        return None


def _num_free_blocks(load: SchedulerLoad) -> int:
    return load.num_free_blocks + load.num_cached_blocks


def _has_room(load: SchedulerLoad, live: LiveRequest) -> bool:
    """Whether a request can run at once and to its end, and each that runs has a block to grow."""
    num_host_blocks = load.num_free_host_blocks + load.num_cached_host_blocks
    return (
        load.num_running + live.num_seqs <= load.max_num_seqs
        and live.max_device_blocks + load.num_running <= _num_free_blocks(load)
        and 0 < live.num_host_blocks <= num_host_blocks
    )


def _has_answered(step: StepId) -> Condition:
    return lambda core: core.last_answered >= step


def _session(engine: Engine) -> Session:
    if engine.session is None:
        raise UnavailableError(f"worker {engine.target} is not attached: {engine.loss}")
    return engine.session


def _check_exchange(giving: Session, taking: Session) -> None:
    """Check what a core does not know of its worker."""
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


@contextlib.contextmanager
def _refusals(live: LiveRequest) -> Iterator[None]:
    try:
        yield
    except MigrationRefusedError as error:
        raise FailedPreconditionError(
            f"request {live.request_id!r} cannot be moved: {error}"
        ) from None


def _go_back(giving: Session, export: Export, taking: Session, room: Import | None) -> None:
    """Let a request go on where it was; a worker that is lost is somebody else's business."""
    with contextlib.suppress(UnavailableError):
        giving.call(lambda core: core.end_export(export.export_id, leaves=False))
    if room is not None:
        import_id = room.import_id
        with contextlib.suppress(UnavailableError):
            taking.call(lambda core: core.end_import(import_id, ()))
