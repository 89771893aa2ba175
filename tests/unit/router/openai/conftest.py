from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from openai_fakes import FakeAdapters, FakeCells, FakeInference

from router.http.api import routes
from router.http.cross_origin import PageGuard


@pytest.fixture
async def inference() -> FakeInference:
    return FakeInference()


@pytest.fixture
def adapters() -> FakeAdapters:
    return FakeAdapters()


@pytest.fixture
def may_be_compressed() -> bool:
    return False


@pytest.fixture
async def server(inference, adapters, may_be_compressed) -> AsyncIterator[tuple[str, int]]:
    """The OpenAI API on a loopback port, run as `rpc.server` runs it."""
    guard = PageGuard(frozenset({"quire.test"}), frozenset({"https://app.test"}))
    app = web.Application(middlewares=[guard.middleware(None)])
    app.add_routes(
        routes(
            FakeCells(inference),
            adapters,
            max_body_bytes=2**20,
            may_be_compressed=may_be_compressed,
        )
    )
    runner = web.AppRunner(
        app, handler_cancellation=True, shutdown_timeout=0.1, auto_decompress=False
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0]
    await runner.cleanup()


@pytest.fixture
async def http(server) -> AsyncIterator[aiohttp.ClientSession]:
    host, port = server
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(f"http://{host}:{port}", headers=headers) as session:
        yield session
