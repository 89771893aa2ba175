"""Asks processes over HTTP whether they are ready."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp

_POLL_S = 0.1
_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Readiness:
    """The answer of `/ready`."""

    ready: bool
    status: str
    """The status in words, such as "loading weights"."""
    progress: float | None = None
    """The progress of a start, in [0, 1]."""


STARTING = Readiness(ready=False, status="starting")
"""The readiness of a process that does not listen yet."""


async def probe(
    session: aiohttp.ClientSession,
    address: str,
    *,
    tls: bool = False,
    timeout_s: float = _TIMEOUT_S,
) -> Readiness | None:
    """Probe the process at `address`, "host:port"; return None if it does not answer in time.

    Like a kubelet, this function does not verify certificates, since it sends nothing secret.
    """
    url = f"{'https' if tls else 'http'}://{address}/ready"
    try:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with session.get(url, timeout=timeout, ssl=False) as response:
            body = await response.json(content_type=None)
            progress = body.get("progress")
            return Readiness(
                ready=response.status == HTTPStatus.OK,
                status=str(body.get("status", "")),
                progress=float(progress) if isinstance(progress, int | float) else None,
            )
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, AttributeError):
        return None


async def wait_until_ready(
    name_to_address: Mapping[str, str],
    show: Callable[[Mapping[str, Readiness]], None] = lambda _: None,
    check: Callable[[], None] = lambda: None,
    *,
    tls: bool = False,
) -> None:
    """Poll until all processes are ready.

    `check` is called before each poll, and may raise an error. `show` gets the answers after each
    poll.
    """
    readiness = dict.fromkeys(name_to_address, STARTING)
    async with aiohttp.ClientSession() as session:
        while not all(each.ready for each in readiness.values()):
            check()
            answers = await asyncio.gather(
                *(probe(session, a, tls=tls) for a in name_to_address.values())
            )
            for name, answer in zip(name_to_address, answers, strict=True):
                readiness[name] = answer or readiness[name]
            show(readiness)
            await asyncio.sleep(_POLL_S)
