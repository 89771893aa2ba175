"""Moves requests from prefill workers to decode workers.

While a prefill worker computes a prompt, the prompt's full blocks are copied to a decode worker.
The request moves when it has its first tokens and the decode worker lacks at most two of the
request's full blocks. The move waits for no further copy: the decode worker recomputes the tokens
of the missing blocks and of the last, partial block. Until a decode worker has room, the request
decodes at its prefill worker, if necessary to its end. So without a decode worker requests are
slower, but none fails.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from contract.errors import FailedPreconditionError, QuireError, UnavailableError
from contract.step import StepId
from contract.worker_limits import STATE_WINDOW
from rpc.tasks import BackgroundTasks
from scheduler_svc.core.handover.moved_request import CopyProgress, MovableRequest
from scheduler_svc.core.interface.config import SchedulerLoad
from scheduler_svc.core.interface.request import SeqKey, SourceId
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.operations.migration import Migrator
from scheduler_svc.workers.engine import Engine
from scheduler_svc.workers.kv.copy import KvCopy, check_exchange, keeps_kv
from scheduler_svc.workers.roster import Roster
from scheduler_svc.workers.session import Session

_LOOK_S: Final = 0.25
"""How often to look for prefill workers that have been attached."""
_PAUSE_S: Final = 5.0
"""After a copy or move from one worker to another has failed, this is the time until the next
request may move from the one to the other."""
_MAX_FOLLOWED: Final = 64
"""For each prefill worker, the limit on requests whose blocks are copied at the same time."""
_MAX_LEFT_BLOCKS: Final = 2
"""A request that has its first tokens moves as soon as the decode worker lacks at most this many of
the request's full blocks. The decode worker recomputes the missing blocks. This takes less time
than another copy, which would wait for a step of the prefill worker."""

log = structlog.get_logger()

_Name = tuple[SourceId, SeqKey]


@dataclass(frozen=True, slots=True, eq=False)
class _Ahead:
    """The decode worker to which a request will move, and the copy of the request's blocks."""

    engine: Engine
    copy: KvCopy


class Handoff:
    """Copies the blocks of prefill workers' requests to decode workers, and moves the requests."""

    def __init__(self, roster: Roster, migrator: Migrator) -> None:
        self._roster = roster
        self._migrator = migrator
        self._tasks = BackgroundTasks()
        self._ahead: set[_Ahead] = set()
        self._paused_until: dict[tuple[Session, Session], float] = {}

    async def run(self) -> None:
        """Watch each prefill worker while it is attached, until cancelled."""
        watched: dict[Session, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                watched = {session: task for session, task in watched.items() if not task.done()}
                now = time.monotonic()
                pauses = self._paused_until.items()
                self._paused_until = {pair: until for pair, until in pauses if until > now}
                sessions = [each.session for each in self._roster.engines if each.session]
                takes_decodes = any(each.role.decodes and keeps_kv(each) for each in sessions)
                for engine in self._roster.engines:
                    session = engine.session
                    if session is None or session.role.decodes or _keeps_states(session):
                        continue
                    session.paces_prompts = not takes_decodes
                    if session not in watched:
                        watched[session] = tasks.create_task(self._watch(engine, session))
                await asyncio.sleep(_LOOK_S)

    def stop(self) -> None:
        """Cancel the moves in progress; called when the sessions end."""
        self._tasks.stop()

    async def _watch(self, source: Engine, giving: Session) -> None:
        """Copy the blocks of a prefill worker's running requests, and move these requests.

        Ends when the worker is lost.
        """
        followed: dict[_Name, asyncio.Task[None]] = {}
        with contextlib.suppress(UnavailableError):
            while True:
                await giving.wait_until(_runs)
                followed = {name: task for name, task in followed.items() if not task.done()}
                last = giving.call(_last_answered)
                for name in giving.call(lambda core: core.moves.find_running()):
                    if name not in followed and len(followed) < _MAX_FOLLOWED:
                        followed[name] = self._tasks.start(self._follow(name, source, giving))
                await giving.wait_until(partial(_has_answered_after, last))

    async def _follow(self, name: _Name, source: Engine, giving: Session) -> None:
        """Copy a request's blocks while they are computed, until the request moves or ends."""
        ahead: _Ahead | None = None
        # If `giving` is lost, the fleet places the request again.
        with contextlib.suppress(UnavailableError):
            try:
                while (progress := giving.call(partial(_progress, name))) is not None:
                    last = giving.call(_last_answered)
                    if ahead is None or not self._has_room(ahead, progress):
                        ahead = self._choose_again(ahead, source, giving, progress)
                    try:
                        if ahead is not None and await self._advance(progress, source, ahead):
                            continue
                    except QuireError as error:
                        giving.check_alive()
                        assert ahead is not None
                        pair = {"source": source.target, "target": ahead.engine.target}
                        log.warning("no moves between two workers", **pair, reason=str(error))
                        self._paused_until[giving, ahead.copy.taking] = time.monotonic() + _PAUSE_S
                        self._give_up(ahead)
                        ahead = None
                    await giving.wait_until(partial(_has_answered_after, last))
            finally:
                if ahead is not None:
                    self._give_up(ahead)

    def _choose_again(
        self, ahead: _Ahead | None, source: Engine, giving: Session, progress: CopyProgress
    ) -> _Ahead | None:
        """Return a worker with room to replace `ahead`; if there is none, return `ahead` itself."""
        if (found := self._find_target(giving, progress)) is None:
            return ahead
        if ahead is not None:
            self._give_up(ahead)
        ahead = _Ahead(found, KvCopy(source.target, giving, found.attached_session()))
        self._ahead.add(ahead)
        return ahead

    def _give_up(self, ahead: _Ahead) -> None:
        """Free the blocks that are still reserved at the decode worker.

        This is done after the request has moved, or when it will not move to this worker.
        """
        ahead.copy.give_up()
        self._ahead.discard(ahead)

    async def _advance(self, progress: CopyProgress, source: Engine, ahead: _Ahead) -> bool:
        """Copy new blocks or move the request.

        Returns:
            Whether anything was copied or moved. If so, the caller calls this method again at once.

        Raises:
            QuireError: A worker is lost, or the copy or move has failed.
        """
        copy = ahead.copy
        may_move = (
            progress.decodes and not copy.giving.is_draining and self._has_room(ahead, progress)
        )
        if progress.can_copy:
            if may_move and copy.num_missing(progress.hashes) <= _MAX_LEFT_BLOCKS:
                self._migrator.switch(progress.live, source, ahead.engine, copy.receive)
                return True
            if await copy.extend(progress.hashes):
                return True
        if may_move:
            copy.give_up()
            await self._migrator.run(progress.live, source, ahead.engine)
        return may_move

    def _find_target(self, giving: Session, progress: CopyProgress) -> Engine | None:
        """Among the decode workers with room for a request, find the least busy one.

        The least busy worker has the fewest sequences, including those that will move to it.
        """
        now = time.monotonic()
        found: list[tuple[int, Engine]] = []
        for engine in self._roster.engines:
            taking = engine.session
            if taking is None or not taking.role.decodes or not keeps_kv(taking):
                continue
            if self._paused_until.get((giving, taking), now) > now or taking.trouble() is not None:
                continue
            if progress.live.max_total_tokens > taking.placement_load().max_request_len:
                continue
            try:
                check_exchange(giving, taking)
            except FailedPreconditionError:
                continue
            load = taking.load()
            if _has_room(load, progress.live):
                num_bound = sum(each.engine is engine for each in self._ahead)
                found.append((load.num_running + load.num_waiting + num_bound, engine))
        return min(found, key=lambda each: each[0])[1] if found else None

    def _has_room(self, ahead: _Ahead, progress: CopyProgress) -> bool:
        copy = ahead.copy
        return _has_room(copy.taking.load(), progress.live, copy.num_reserved)


def _keeps_states(session: Session) -> bool:
    """Whether the worker's model has recurrent states.

    The requests of such a worker are not handed to decode workers. Only the states at the ends of
    full blocks can be copied. So after a move, the decode worker would have to recompute up to a
    block of tokens.
    """
    return STATE_WINDOW in session.info.limits.kv_windows


def _progress(name: _Name, core: Scheduler) -> CopyProgress | None:
    return core.moves.progress(*name)


def _runs(core: Scheduler) -> bool:
    return bool(core.running)


def _last_answered(core: Scheduler) -> StepId:
    return core.steps.last_answered


def _has_answered_after(step: StepId, core: Scheduler) -> bool:
    return core.steps.last_answered > step


def _has_room(load: SchedulerLoad, live: MovableRequest, num_reserved: int = 0) -> bool:
    """Whether a request can run at once at a decode worker with the load `load`.

    There must also be room for the requests that are arriving at the worker. Their KV is in held
    host blocks until they start. `num_reserved` is the number of held host blocks that are for
    `live` itself. In addition, each sequence may need one more block.
    """
    num_available = load.num_free_blocks + load.num_cached_blocks
    num_host_available = load.num_free_host_blocks + load.num_cached_host_blocks
    num_arriving = load.num_host_blocks - num_host_available - num_reserved
    num_seqs = load.num_running + load.num_waiting + live.num_seqs
    return (
        not load.is_memory_short
        and num_seqs <= load.max_num_seqs
        and live.num_device_blocks + num_seqs + num_arriving <= num_available
        and live.num_device_blocks - num_reserved <= num_host_available
    )
