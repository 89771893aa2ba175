"""`quire probe`: checks whether a process is ready."""

import asyncio
from collections.abc import Sequence

import aiohttp

from quire.cli.readiness import Readiness, probe
from quire.cli.settings import ProbeSettings
from quire.cli.up.ports import join, reachable
from rpc.settings import parse_settings


def main(argv: Sequence[str]) -> int:
    """Run `quire probe`; return the exit code, which is 0 if the process is ready."""
    settings = parse_settings(ProbeSettings, "quire probe", argv)
    address = join(reachable(settings.host), settings.http_port)
    answer = asyncio.run(_probe_once(address, tls=settings.tls_cert is not None))
    print(f"{address}: {'does not answer' if answer is None else answer.status}")
    return 0 if answer is not None and answer.ready else 1


async def _probe_once(address: str, *, tls: bool) -> Readiness | None:
    async with aiohttp.ClientSession() as session:
        return await probe(session, address, tls=tls)
