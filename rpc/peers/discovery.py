"""Finds other processes from a list of targets, which are addresses or DNS names.

`keep_members` runs a task for each process, until the process is no longer among the targets.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

import structlog

from rpc.grpc_server import join

_PREFIX: Final = "dns:"
_GRPC_PREFIX: Final = "dns://"
"""Prefix of targets that gRPC itself resolves to one process."""

log = structlog.get_logger()


class Resolver(Protocol):
    """Looks up the addresses of a name."""

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """Return a target for each address of `host`; raises OSError if the lookup fails."""


class DnsResolver:
    """The system's resolver."""

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """See `Resolver`. If a name has IPv4 and IPv6 addresses, only the IPv4 ones count.

        A process may have an address of each family, and would otherwise be found twice.
        """
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family = min((each[0] for each in found), default=socket.AF_INET)  # INET before INET6
        return sorted({join(str(each[4][0]), port) for each in found if each[0] == family})


def check_targets(targets: Sequence[str]) -> None:
    """Check the operator's list of targets.

    Raises:
        ValueError: The list is empty, has a target twice, or has a malformed DNS name.
    """
    if not targets:
        raise ValueError("is empty; it must have at least one target")
    if twice := {target for target in targets if targets.count(target) > 1}:
        raise ValueError(f"names {', '.join(sorted(twice))} twice")
    for target in targets:
        if _is_name(target):
            _split(target)


class Discovery:
    """The current targets: the listed addresses, and the addresses of the listed DNS names.

    Looks up the DNS names at intervals.
    """

    def __init__(
        self, targets: Sequence[str], *, resolver: Resolver | None = None, interval_s: float = 5.0
    ) -> None:
        """A target is a gRPC target, or dns:HOST:PORT, which means every address of HOST."""
        check_targets(targets)
        self._listed = tuple(targets)
        self._resolver = DnsResolver() if resolver is None else resolver
        self.interval_s = interval_s
        """Seconds between two lookups."""
        self._answers: dict[str, tuple[str, ...]] = {}
        """The last successful answer for each name."""
        self._resolved_at: float | None = None

    @property
    def is_static(self) -> bool:
        """Whether no target is a DNS name, so that the targets never change."""
        return not any(map(_is_name, self._listed))

    async def targets(self) -> tuple[str, ...]:
        """Return the current targets, each once.

        If the lookup of a name fails or finds no addresses, the last answer stays valid, because
        DNS may be down while the processes are healthy.
        """
        now = asyncio.get_running_loop().time()
        if self._resolved_at is None or now - self._resolved_at >= self.interval_s:
            self._resolved_at = now
            await asyncio.gather(*(self._resolve(each) for each in self._listed if _is_name(each)))
        found = (
            self._answers.get(each, ()) if _is_name(each) else (each,) for each in self._listed
        )
        return tuple(dict.fromkeys(target for targets in found for target in targets))

    async def _resolve(self, name: str) -> None:
        try:
            answer = tuple(await self._resolver.resolve(*_split(name)))
        except OSError as error:
            log.warning("a name cannot be resolved", name=name, reason=str(error))
            return
        if answer:
            self._answers[name] = answer


def _is_name(target: str) -> bool:
    return target.startswith(_PREFIX) and not target.startswith(_GRPC_PREFIX)


def _split(name: str) -> tuple[str, int]:
    host, _, port = name.removeprefix(_PREFIX).rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"has {name}, which must be dns:HOST:PORT")
    return host, int(port)


class MemberTask(Protocol):
    """A task for one discovered process."""

    target: str

    async def run(self) -> None:
        """Run until cancelled; an error that it raises ends `keep_members`."""


M = TypeVar("M", bound=MemberTask)


async def keep_members(
    discovery: Discovery,
    *,
    join: Callable[[str], M],
    may_leave: Callable[[M], bool],
    left: Callable[[M], None],
) -> None:
    """Run a `MemberTask` for each target until cancelled; if one fails, raise its error.

    Args:
        discovery: The targets.
        join: Makes the member, a `MemberTask`, for a new target.
        may_leave: Returns whether a member whose target is gone may end; called at each lookup
            until it returns True.
        left: Called with a member that has ended because its target is gone.
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
                    log.info("a target is no longer listed", target=member.target)
                    del tasks[task]
                    await _end(task)
                    left(member)
            await _wait(discovery, tasks)
    finally:
        await _end(*tasks)


async def _wait(discovery: Discovery, tasks: dict[asyncio.Task[None], M]) -> None:
    """Wait until the next lookup is due; if a member's task fails first, raise its error."""
    if not tasks:
        await asyncio.sleep(discovery.interval_s)
        return
    timeout_s = None if discovery.is_static else discovery.interval_s
    done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for failed in done:
        log.critical("a task failed", target=failed.get_name(), exc_info=failed.exception())
        await failed


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
