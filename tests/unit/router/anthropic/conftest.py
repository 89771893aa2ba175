from collections.abc import AsyncIterator

import anthropic
import pytest
from aiohttp import web
from openai_fakes import FakeAdapters, FakeCells, FakeInference

from router.http.api import routes


@pytest.fixture
async def inference() -> FakeInference:
    return FakeInference()


@pytest.fixture
async def url(inference) -> AsyncIterator[str]:
    """The address of a server of all HTTP routes, run as `rpc.server` runs it."""
    app = web.Application()
    app.add_routes(routes(FakeCells(inference), FakeAdapters(), max_body_bytes=2**20))
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    yield f"http://{host}:{port}"
    await runner.cleanup()


@pytest.fixture
async def client(url) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=url, api_key="none", max_retries=0, timeout=None
    ) as client:
        yield client
