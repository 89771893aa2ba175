"""Moves requests from prefill workers to decode workers when their prompts are computed.

A request goes on decoding at its prefill worker until a decode worker has room for it, or for good
if there is none. So a missing worker costs speed and no request.
"""

import asyncio
import contextlib
import time
from functools import partial
from typing import Final

from contract.errors import FailedPreconditionError, QuireError, UnavailableError
from contract.step import StepId
from rpc.tasks import BackgroundTasks
from scheduler_svc.core.config import SchedulerLoad
from scheduler_svc.core.handover.moved_request import MovableRequest
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.operations.migration import Migrator, check_exchange, keeps_kv
from scheduler_svc.workers.engine import Engine
from scheduler_svc.workers.roster import Roster
from scheduler_svc.workers.session import Session

_LOOK_S: Final = 0.25
"""How often to look for prefill workers that have been attached."""
_PAUSE_S: Final = 5.0
"""How long two workers exchange nothing after a failure between them."""
_MAX_MOVES: Final = 16
"""Concurrent moves from one worker: each holds host blocks of both workers."""
_MAX_LEFT: Final = 4
"""How many requests without a target end a look at the rest, most of which would find none."""


class Handoff:
    """Watches the prefill workers, and moves what decodes there."""

    def __init__(self, roster: Roster, migrator: Migrator) -> None:
        self._roster = roster
        self._migrator = migrator
        self._moves = BackgroundTasks()
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
        self._moves.stop()

    async def _watch(self, source: Engine, session: Session) -> None:
        """Move the requests that decode at a prefill worker, until it is lost."""
        room = asyncio.Semaphore(_MAX_MOVES)
        with contextlib.suppress(UnavailableError):
            while True:
                await session.wait_until(_decodes)
                last = session.call(_last_answered)
                num_left_here = 0
                for live in session.call(lambda core: core.moves.find_decoding()):
                    if room.locked() or num_left_here == _MAX_LEFT or session.is_draining:
                        break
                    target = self._find_target(source, session, live)
                    if target is None:
                        num_left_here += 1
                        continue
                    await room.acquire()
                    self._moves.start(self._move(live, source, target, room))
                    await asyncio.sleep(0)  # it takes its blocks before the next one looks for room
                await session.wait_until(partial(_has_answered_after, last))

    async def _move(
        self, live: MovableRequest, source: Engine, target: Engine, room: asyncio.Semaphore
    ) -> None:
        try:
            await self._migrator.run(live, source, target)
        except QuireError:  # the migrator has logged it
            self._paused_until[source, target] = time.monotonic() + _PAUSE_S
        finally:
            room.release()

    def _find_target(self, source: Engine, giving: Session, live: MovableRequest) -> Engine | None:
        """Find the worker with the fewest sequences that decodes and has room for a request."""
        now = time.monotonic()
        found: list[tuple[int, Engine]] = []
        for engine in self._roster.engines:
            taking = engine.session
            if taking is None or not taking.role.decodes or not keeps_kv(taking):
                continue
            if self._paused_until.get((source, engine), now) > now or taking.trouble() is not None:
                continue
            if live.max_total_tokens > taking.placement_load().max_request_len:
                continue
            try:
                check_exchange(giving, taking)
            except FailedPreconditionError:
                continue
            load = taking.load()
            if _has_room(load, live):
                found.append((load.num_running + load.num_waiting, engine))
        return min(found, key=lambda each: each[0])[1] if found else None


def _decodes(core: Scheduler) -> bool:
    return core.running.num_decoding > 0


def _last_answered(core: Scheduler) -> StepId:
    return core.steps.last_answered


def _has_answered_after(step: StepId, core: Scheduler) -> bool:
    return core.steps.last_answered > step


def _has_room(load: SchedulerLoad, live: MovableRequest) -> bool:
    """Whether a request can go on at once, beside those that are arriving.

    Their KV is in host blocks, until they start. Each running sequence may need one more block.
    """
    num_available = load.num_free_blocks + load.num_cached_blocks
    num_host_available = load.num_free_host_blocks + load.num_cached_host_blocks
    num_arriving = load.num_host_blocks - num_host_available
    num_seqs = load.num_running + load.num_waiting + live.num_seqs
    return (
        not load.is_memory_short
        and num_seqs <= load.max_num_seqs
        and live.num_device_blocks + num_seqs + num_arriving <= num_available
        and live.num_device_blocks <= num_host_available
    )
