"""`quire probe` reports whether a process is ready, as text and by its exit code."""

import asyncio
import ssl

import pytest
import trustme
from aiohttp import web
from aiohttp.test_utils import TestServer

from quire.cli.commands.processes import probe
from rpc.health import Health, probes


@pytest.fixture
async def process():
    """The HTTP server of a process that has just started, and its health."""
    health = Health()
    async with TestServer(web.Application(middlewares=[probes(health)])) as server:
        yield server, health


async def _probe(monkeypatch, host: str, port: int) -> int:
    monkeypatch.setenv("QUIRE_HOST", host)
    monkeypatch.setenv("QUIRE_HTTP_PORT", str(port))
    return await asyncio.to_thread(probe.main, [])


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_process_that_is_ready_is_0(process, host, monkeypatch, capsys):
    server, health = process
    health.set_ready()
    assert await _probe(monkeypatch, host, server.port) == 0
    assert capsys.readouterr().out == f"127.0.0.1:{server.port}: ready\n"


async def test_process_with_a_certificate_is_asked_in_tls(monkeypatch, tmp_path, capsys):
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("quire.test").configure_cert(context)
    health = Health()
    health.set_ready()
    server = TestServer(web.Application(middlewares=[probes(health)]), scheme="https")
    await server.start_server(ssl=context)
    monkeypatch.setenv("QUIRE_TLS_CERT", str(tmp_path / "only its name is looked at"))
    assert await _probe(monkeypatch, "127.0.0.1", server.port) == 0
    assert "ready" in capsys.readouterr().out
    await server.close()


async def test_process_that_is_not_ready_is_1_with_its_reason(process, monkeypatch, capsys):
    server, health = process
    health.set_not_ready("no worker is attached: w")
    assert await _probe(monkeypatch, "127.0.0.1", server.port) == 1
    assert "no worker is attached: w" in capsys.readouterr().out


async def test_port_without_a_listener_is_1(process, monkeypatch, capsys):
    server, _ = process
    port = server.port
    await server.close()
    assert await _probe(monkeypatch, "127.0.0.1", port) == 1
    assert "does not answer" in capsys.readouterr().out
