"""Runs a process's servers in the test's event loop, on a Unix socket."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest

from rpc.health import Health
from rpc.server import Addresses, serve
from rpc.settings import ProcessSettings


@pytest.fixture
def socket_path():
    # pytest's own temporary paths can be longer than a socket's may be.
    with tempfile.TemporaryDirectory(prefix="q-") as folder:
        yield Path(folder) / "s"


@pytest.fixture
def settings(socket_path):
    return ProcessSettings(uds=socket_path, drain_s=20)


@contextlib.asynccontextmanager
async def running(settings, health=None, services=(), **arguments) -> AsyncIterator[Addresses]:
    """Serve for as long as the block runs; the drain happens at its end."""
    started: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
    stop = arguments.pop("stop", None) or asyncio.Event()

    async def on_started(addresses: Addresses) -> None:
        started.set_result(addresses)

    server = asyncio.create_task(
        serve(
            settings,
            health=health or Health(),
            services=services,
            on_started=on_started,
            stop=stop,
            **arguments,
        )
    )
    await asyncio.wait((server, started), return_when=asyncio.FIRST_COMPLETED)
    if server.done():
        server.result()
    try:
        yield started.result()
    finally:
        stop.set()
        await server


@pytest.fixture
def by_grpcio() -> bool:
    """Whether grpcio serves gRPC, as in schedulers and workers, or our own server."""
    return True


@pytest.fixture
def run_server(by_grpcio) -> Callable[..., contextlib.AbstractAsyncContextManager[Addresses]]:
    return partial(running, grpc_by_grpcio=by_grpcio)
