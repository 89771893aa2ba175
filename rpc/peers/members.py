"""Keeps something running for each process that is discovered, as these come and go."""

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

import structlog

from rpc.peers.discovery import Discovery

log = structlog.get_logger()


class Member(Protocol):
    """What runs for one process."""

    target: str

    async def run(self) -> None:
        """Run until cancelled; an end of any other kind is a failure."""


M = TypeVar("M", bound=Member)


async def keep_members(
    discovery: Discovery,
    *,
    join: Callable[[str], M],
    may_leave: Callable[[M], bool],
    left: Callable[[M], None],
) -> None:
    """Run a member for each target until cancelled, or until one fails; raise what it raised.

    Args:
        discovery: Says who is there.
        join: Makes the member of a target that is new.
        may_leave: Asked of one whose target is not there any more, until it says yes.
        left: Told of one that will not run any more.
    """
    tasks: dict[asyncio.Task[None], M] = {}
    try:
        while True:
            targets = await discovery.targets()
            for target in targets:
                if all(member.target != target for member in tasks.values()):
                    joined = join(target)
                    tasks[asyncio.create_task(joined.run(), name=target)] = joined
            for task, member in tuple(tasks.items()):
                if member.target not in targets and may_leave(member):
                    log.info("gone from discovery", target=member.target)
                    del tasks[task]
                    await _end(task)
                    left(member)
            await _wait(discovery, tasks)
    finally:
        await _end(*tasks)


async def _wait(discovery: Discovery, tasks: dict[asyncio.Task[None], M]) -> None:
    """Wait until it is time to look again; raise what a task raised."""
    if not tasks:
        await asyncio.sleep(discovery.interval_s)
        return
    timeout_s = None if discovery.is_static else discovery.interval_s
    done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for failed in done:
        log.critical("failed", target=failed.get_name(), exc_info=failed.exception())
        await failed


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
