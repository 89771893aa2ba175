"""Which processes there are: targets as the operator lists them, some of them names in DNS."""

import asyncio
import socket
from collections.abc import Sequence
from typing import Final, Protocol

import structlog

from rpc.grpc_server import join

_PREFIX: Final = "dns:"
_GRPC_PREFIX: Final = "dns://"
"""gRPC resolves these itself, to one process."""

log = structlog.get_logger()


class Resolver(Protocol):
    """Asks for the addresses of a name."""

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """Return the targets that the name stands for now; raise OSError if nobody can tell."""


class DnsResolver:
    """The system's resolver."""

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """See `Resolver`. Of a process with addresses of both families only IPv4's is given."""
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family = min((each[0] for each in found), default=socket.AF_INET)  # INET before INET6
        return sorted({join(str(each[4][0]), port) for each in found if each[0] == family})


def check_targets(targets: Sequence[str]) -> None:
    """Check what an operator lists.

    Raises:
        ValueError: It is empty, names one twice, or has a name for DNS without host or port.
    """
    if not targets:
        raise ValueError("names none; at least one is needed")
    if twice := {target for target in targets if targets.count(target) > 1}:
        raise ValueError(f"names {', '.join(sorted(twice))} twice")
    for target in targets:
        if _is_name(target):
            _split(target)


class Discovery:
    """Looks names up again and again; what is listed by address is always there."""

    def __init__(
        self, targets: Sequence[str], *, resolver: Resolver | None = None, interval_s: float = 5.0
    ) -> None:
        """`targets` are gRPC targets, or dns:HOST:PORT for each address that the name has."""
        check_targets(targets)
        self._listed = tuple(targets)
        self._resolver = DnsResolver() if resolver is None else resolver
        self.interval_s = interval_s
        """How old an answer may become before a name is looked up again."""
        self._answers: dict[str, tuple[str, ...]] = {}
        """The last that was no failure, by name."""
        self._resolved_at: float | None = None

    @property
    def is_static(self) -> bool:
        """Whether the answer is always the same."""
        return not any(map(_is_name, self._listed))

    async def targets(self) -> tuple[str, ...]:
        """Return who is there, each once.

        A name of which nobody can tell, or that has no address, stands for what it last stood for:
        whoever runs DNS may fail, and the processes be well.
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
