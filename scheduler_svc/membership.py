"""Which workers a scheduler has: an engine runs for each that is there, and they come and go."""

import asyncio
from collections.abc import Callable

import structlog

from rpc.discovery import Discovery
from scheduler_svc.engine import Engine
from scheduler_svc.fleet import Fleet

log = structlog.get_logger()


class Membership:
    """Adds to the fleet who is discovered, and takes from it who is gone for good.

    That is: neither discovered any more nor attached. A worker that only DNS has lost works on; one
    that has only died is waited for.
    """

    def __init__(
        self,
        discovery: Discovery,
        fleet: Fleet,
        *,
        make_engine: Callable[[str], Engine],
        forget: Callable[[str], None],
    ) -> None:
        """`make_engine` makes the engine of a target; `forget` is told of those taken away."""
        self._discovery = discovery
        self._fleet = fleet
        self._make_engine = make_engine
        self._forget = forget
        self._tasks: dict[asyncio.Task[None], Engine] = {}

    async def run(self) -> None:
        """Run the engines until cancelled.

        Raises:
            StaleEpochError: A newer scheduler has taken over.
            BrokenInvariantError: An engine has a bug.
        """
        self._fleet.begin()
        try:
            while True:
                await self._follow(await self._discovery.targets())
                await self._wait()
        finally:
            await _end(*self._tasks)

    async def _follow(self, targets: tuple[str, ...]) -> None:
        known = {engine.target for engine in self._tasks.values()}
        for target in targets:
            if target not in known:
                engine = self._make_engine(target)
                self._fleet.add(engine)
                self._tasks[asyncio.create_task(engine.run(), name=target)] = engine
        for task, engine in tuple(self._tasks.items()):
            if engine.target not in targets and engine.session is None:
                log.info("worker is gone", worker=engine.target)
                del self._tasks[task]
                self._fleet.remove(engine)
                self._forget(engine.target)
                await _end(task)

    async def _wait(self) -> None:
        """Wait until it is time to look again, or an engine has failed."""
        if not self._tasks:
            await asyncio.sleep(self._discovery.interval_s)
            return
        timeout_s = None if self._discovery.is_static else self._discovery.interval_s
        done, _ = await asyncio.wait(
            self._tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        for failed in done:
            self._fleet.note_failure()
            error = failed.exception()
            log.critical("an engine has failed", worker=failed.get_name(), exc_info=error)
            await failed


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
