"""Empties workers that, or whose models, are about to go, so that sequences lose little or nothing.

Each live request is moved with its KV to another worker. What cannot be moved (a worker has no host
memory for KV, or not enough) stays until the others are gone, and then goes on elsewhere as after a
loss: it computes its tokens again.
"""

import asyncio
import contextlib
import time
from typing import Final

import structlog

from contract.errors import QuireError, UnavailableError
from scheduler_svc.core.handover.moved_request import LiveRequest
from scheduler_svc.operations.migrator import Migrator
from scheduler_svc.workers.engine import Engine
from scheduler_svc.workers.fleet import Fleet
from scheduler_svc.workers.session import Session

_MAX_MOVES: Final = 4
"""At once from one worker; each is a copy over the network, and room in two host tiers."""

log = structlog.get_logger()


class Drainer:
    """Moves the requests of workers that drain, and lets these go."""

    def __init__(self, fleet: Fleet, migrator: Migrator) -> None:
        self._fleet = fleet
        self._migrator = migrator

    async def run(self) -> None:
        """Empty each worker that says that it is about to end, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                engine = await self._fleet.next_draining()
                if engine.session is not None:
                    tasks.create_task(self._empty(engine, engine.session))

    async def _empty(self, engine: Engine, session: Session) -> None:
        with contextlib.suppress(UnavailableError):  # it did not wait
            await self.move_away(engine, session)
            await session.let_go()
            log.info("worker is let go", worker=engine.target)

    async def move_away(self, engine: Engine, session: Session) -> None:
        """Move what can be moved of a worker, of which nothing new is placed any more.

        Raises:
            UnavailableError: It is lost.
        """
        started = time.perf_counter()
        lives = session.call(lambda core: core.find_requests())
        room = asyncio.Semaphore(_MAX_MOVES)
        are_moved = await asyncio.gather(*(self._move(live, engine, room) for live in lives))
        log.info(
            "a worker is emptied",
            worker=engine.target,
            num_requests=len(lives),
            num_moved=sum(are_moved),
            seconds=round(time.perf_counter() - started, 3),
        )

    async def _move(self, live: LiveRequest, source: Engine, room: asyncio.Semaphore) -> bool:
        async with room:
            target = self._find_target(source)
            if target is None:
                return False
            try:
                await self._migrator.move(live, source, target)
            except QuireError:  # it is in the log
                return False
            return True

    def _find_target(self, source: Engine) -> Engine | None:
        """Find the worker with the most room among those that take KV of this one, if any does."""
        if source.session is None or not _keeps_kv(source.session):
            return None
        loads = [
            (session.load(), engine)
            for engine in self._fleet.roster.engines
            if (session := engine.session) is not None
            and _keeps_kv(session)
            and not session.is_draining
        ]
        if not loads:
            return None
        return max(loads, key=lambda each: each[0].num_free_blocks + each[0].num_cached_blocks)[1]


def _keeps_kv(session: Session) -> bool:
    return session.info.takes_kv and session.info.limits.num_host_blocks > 0
