from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from openai_fakes import FakeAdapters, FakeInference

from router.http.api import routes
from router.http.web_pages import PageGuard


@pytest.fixture
async def inference() -> FakeInference:
    return FakeInference()


@pytest.fixture
def adapters() -> FakeAdapters:
    return FakeAdapters()


@pytest.fixture
async def server(inference, adapters) -> AsyncIterator[tuple[str, int]]:
    """The OpenAI API on a loopback port, run as `rpc.server` runs it."""
    app = web.Application()
    app.add_routes(routes(inference, adapters, guard=PageGuard("quire.test"), max_body_bytes=2**20))
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0]
    await runner.cleanup()


@pytest.fixture
async def http(server) -> AsyncIterator[aiohttp.ClientSession]:
    host, port = server
    async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
        yield session
