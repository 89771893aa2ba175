"""Moves requests from prefill workers to decode workers.

While a prompt is computed, its full blocks are copied to the decode worker. When the request has
its first tokens and the blocks are there, it moves in one turn of the event loop; the decode worker
computes only the tokens of the last, partial block again. It goes on decoding at its prefill worker
until a decode worker has room for it, or to its end if there is none. So a missing worker costs
speed and no request.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final

import structlog

from contract.errors import FailedPreconditionError, QuireError, UnavailableError
from contract.hashing import BlockHash
from contract.step import StepId
from rpc.tasks import BackgroundTasks
from scheduler_svc.core.config import SchedulerLoad
from scheduler_svc.core.handover.copies import Loan, RoomId
from scheduler_svc.core.handover.moved_request import MovableRequest, Progress
from scheduler_svc.core.request import SeqKey, SourceId
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.operations.migration import Migrator, check_exchange, has_answered, keeps_kv
from scheduler_svc.workers.engine import Engine
from scheduler_svc.workers.roster import Roster
from scheduler_svc.workers.session import Session

_LOOK_S: Final = 0.25
"""How often to look for prefill workers that have been attached."""
_PAUSE_S: Final = 5.0
"""How long two workers exchange nothing after a failure between them."""
_MAX_FOLLOWED: Final = 64
"""Most requests of one worker whose blocks are copied at a time."""
_MAX_LEFT_BLOCKS: Final = 2
"""A request moves when so few of its full blocks are missing at the other worker; computing them
again takes less time than another copy, which waits for a step of the prefill worker."""

log = structlog.get_logger()

_Name = tuple[SourceId, SeqKey]


class Handoff:
    """Watches the prefill workers, and follows each request there until it has moved."""

    def __init__(self, roster: Roster, migrator: Migrator) -> None:
        self._roster = roster
        self._migrator = migrator
        self._tasks = BackgroundTasks()
        self._num_bound: Counter[Engine] = Counter()
        """Requests that are about to move to each worker."""
        self._paused_until: dict[tuple[Engine, Engine], float] = {}

    async def run(self) -> None:
        """Watch each prefill worker while it is attached, until cancelled."""
        watched: dict[Session, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                watched = {session: task for session, task in watched.items() if not task.done()}
                now = time.monotonic()
                pauses = self._paused_until.items()
                self._paused_until = {pair: until for pair, until in pauses if until > now}
                for engine in self._roster.engines:
                    session = engine.session
                    if session is not None and not session.role.decodes and session not in watched:
                        watched[session] = tasks.create_task(self._watch(engine, session))
                await asyncio.sleep(_LOOK_S)

    def stop(self) -> None:
        """Cancel the moves in progress, when the sessions end."""
        self._tasks.stop()

    async def _watch(self, source: Engine, giving: Session) -> None:
        """Follow the requests that run at a prefill worker, until it is lost."""
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
        """Copy a request's blocks as they are computed, and move it, or see it end."""
        ahead: _Ahead | None = None
        with contextlib.suppress(UnavailableError):  # `giving` is lost; the fleet places it again
            try:
                while (progress := giving.call(partial(_progress, name))) is not None:
                    last = giving.call(_last_answered)
                    if ahead is None and (found := self._find_target(source, giving, progress)):
                        ahead = _Ahead(source, giving, found, self._num_bound)
                    try:
                        if ahead is not None and await self._advance(progress, ahead):
                            continue
                    except QuireError as error:
                        giving.check_alive()
                        assert ahead is not None
                        pair = {"source": source.target, "target": ahead.engine.target}
                        log.warning("no moves between two workers", **pair, reason=str(error))
                        self._paused_until[source, ahead.engine] = time.monotonic() + _PAUSE_S
                        ahead.give_up()
                        ahead = None
                    if (
                        ahead is not None
                        and not self._has_room(ahead, progress)
                        and (found := self._find_target(source, giving, progress)) is not None
                    ):
                        ahead.give_up()
                        ahead = _Ahead(source, giving, found, self._num_bound)
                    await giving.wait_until(partial(_has_answered_after, last))
            finally:
                if ahead is not None:
                    ahead.give_up()

    async def _advance(self, progress: Progress, ahead: "_Ahead") -> bool:
        """Copy what is new, or move the request; return whether to look at once again.

        Raises:
            QuireError: A worker is lost, or the copy or move has failed.
        """
        may_move = (
            progress.decodes and not ahead.giving.is_draining and self._has_room(ahead, progress)
        )
        if progress.can_copy:
            if may_move and ahead.num_missing(progress.hashes) <= _MAX_LEFT_BLOCKS:
                self._migrator.switch(progress.live, ahead.source, ahead.engine, ahead.receive)
                return True
            if await ahead.extend(progress.hashes):
                return True
        if may_move:
            ahead.give_up()
            await self._migrator.run(progress.live, ahead.source, ahead.engine)
        return may_move

    def _find_target(self, source: Engine, giving: Session, progress: Progress) -> Engine | None:
        """Find the worker with the fewest sequences that decodes and has room for a request."""
        now = time.monotonic()
        found: list[tuple[int, Engine]] = []
        for engine in self._roster.engines:
            taking = engine.session
            if taking is None or not taking.role.decodes or not keeps_kv(taking):
                continue
            if self._paused_until.get((source, engine), now) > now or taking.trouble() is not None:
                continue
            if progress.live.max_total_tokens > taking.placement_load().max_request_len:
                continue
            try:
                check_exchange(giving, taking)
            except FailedPreconditionError:
                continue
            load = taking.load()
            if _has_room(load, progress.live):
                num_seqs = load.num_running + load.num_waiting + self._num_bound[engine]
                found.append((num_seqs, engine))
        return min(found, key=lambda each: each[0])[1] if found else None

    def _has_room(self, ahead: "_Ahead", progress: Progress) -> bool:
        return _has_room(ahead.taking.load(), progress.live, ahead.num_reserved)


class _Ahead:
    """The blocks of one request that were copied to one worker, before the request moves there."""

    def __init__(
        self, source: Engine, giving: Session, engine: Engine, num_bound: Counter[Engine]
    ) -> None:
        self.source, self.giving = source, giving
        self.engine, self.taking = engine, engine.attached_session()
        self.num_reserved = 0
        """Host blocks that are held there for it."""
        self._rooms: dict[RoomId, int] = {}  # with the number of blocks that have arrived
        self._there: set[BlockHash] = set()
        self._num_bound = num_bound
        self._is_bound = True
        num_bound[engine] += 1

    def num_missing(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many of a request's blocks are not there."""
        return sum(each not in self._there for each in hashes)

    async def extend(self, hashes: Sequence[BlockHash]) -> bool:
        """Copy the blocks that are not there; return whether any has come.

        Raises:
            UnavailableError: A worker is lost, or the copy has failed.
        """
        new = [each for each in hashes if each not in self._there]
        if not new:
            return False
        room = self.taking.call(lambda core: core.expect(new))
        loan: Loan | None = None
        num_arrived = 0
        self._rooms[room.room_id] = 0
        self.num_reserved += len(room.hashes)
        try:
            loan = self.giving.call(lambda core: core.lend(room.hashes))
            if num_lent := len(loan.hashes):
                await self.giving.wait_until(has_answered(loan.ready_step))
                await self.taking.wait_until(has_answered(room.ready_step))
                targets = room.host_block_ids[:num_lent]
                await self.taking.link.pull_kv(
                    *(self.source.target, self.giving.info.instance_id),
                    *(loan.host_block_ids, targets),
                )
            self.giving.check_alive()
            num_arrived = num_lent
        finally:
            if loan is not None:
                loan_id = loan.loan_id
                with contextlib.suppress(UnavailableError):
                    self.giving.call(lambda core: core.end_loan(loan_id))
        missing = {*room.hashes[num_arrived:], *room.refused}
        there = [each for each in new if each not in missing]
        self._there.update(there)
        if num_arrived:
            self._rooms[room.room_id] = num_arrived
        else:
            self._end_room(room.room_id, len(room.hashes))
        return bool(there)

    def receive(self) -> None:
        """Let the request find its blocks there.

        Raises:
            UnavailableError: The worker is lost.
        """
        for room_id, num_arrived in self._rooms.items():
            self.taking.call(partial(_receive, room_id, num_arrived))
        self._rooms.clear()
        self._unbind()

    def give_up(self) -> None:
        """Free what is held there; does nothing after `receive`."""
        with contextlib.suppress(UnavailableError):
            for room_id in self._rooms:
                self.taking.call(partial(_receive, room_id, 0))
        self._rooms.clear()
        self._unbind()

    def _end_room(self, room_id: RoomId, num_blocks: int) -> None:
        del self._rooms[room_id]
        self.num_reserved -= num_blocks
        self.taking.call(partial(_receive, room_id, 0))

    def _unbind(self) -> None:
        self._num_bound[self.engine] -= self._is_bound
        self._is_bound = False


def _progress(name: _Name, core: Scheduler) -> Progress | None:
    return core.moves.progress(*name)


def _receive(room_id: RoomId, num_arrived: int, core: Scheduler) -> None:
    core.receive(room_id, num_arrived)


def _runs(core: Scheduler) -> bool:
    return bool(core.running)


def _last_answered(core: Scheduler) -> StepId:
    return core.steps.last_answered


def _has_answered_after(step: StepId, core: Scheduler) -> bool:
    return core.steps.last_answered > step


def _has_room(load: SchedulerLoad, live: MovableRequest, num_reserved: int = 0) -> bool:
    """Whether a request can go on at once, beside those that are arriving.

    Their KV is in host blocks until they start; `num_reserved` of these are the request's own. Each
    running sequence may need one more block.
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
