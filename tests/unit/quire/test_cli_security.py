"""`quire up` with certificates and keys, and its probes and commands."""

from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from contract.errors import UnavailableError
from quire.cli.command_error import CommandError
from quire.cli.readiness import probe
from quire.cli.settings import GenerateSettings
from quire.cli.target import connection_errors
from quire.cli.up import layout
from quire.cli.up.settings import UpSettings
from quire.cli.up.welcome import how_to_use
from rpc.security.tls import ServerTls, explain, http_context
from rpc.settings import parse_settings
from tests.certificates import Authority


def planned(environment=None, **flags):
    settings = UpSettings(http_port=0, grpc_port=0, simulate=1, **flags)
    chosen = layout.choose_ports(settings)
    return layout.plan(
        settings, {"tiny": "/models/tiny"}, chosen, Path("/run/q"), environment or {}
    )


def test_every_process_gets_the_certificates(tmp_path):
    files = Authority(tmp_path / "ca").issue("process")
    layout_ = planned(**files.as_peer, tls_server_name="quire", max_metadata_kb=8)
    assert layout_.service.has_tls
    for spec in layout_.specs:
        flags = dict(zip(spec.argv[4::2], spec.argv[5::2], strict=True))
        assert flags["--tls-cert"] == str(files.cert)
        assert flags["--tls-key"] == str(files.key)
        assert flags["--tls-ca"] == flags["--tls-client-ca"] == str(files.ca)
        assert flags["--tls-server-name"] == "quire"
        assert flags["--max-metadata-kb"] == "8"
    assert not planned().service.has_tls
    assert "https://" in how_to_use(layout_.service)


def test_keys_go_to_the_router_only_and_not_on_its_command_line():
    for layout_ in (
        planned(api_key="sk-1,sk-2", api_keys_file="/keys.toml"),
        planned({"QUIRE_API_KEY": "sk-1,sk-2"}, api_key="sk-1,sk-2", api_keys_file="/keys.toml"),
    ):
        for spec in layout_.specs:
            assert "sk-1" not in " ".join(spec.argv)
            expected = "sk-1,sk-2" if spec.name == "router" else None
            assert spec.environment.get("QUIRE_API_KEY") == expected
            assert ("--api-keys-file" in spec.argv) == (spec.name == "router")


async def test_probe_asks_by_tls_where_that_is_spoken(tmp_path):
    files = Authority(tmp_path / "ca").issue("process", "another.name")

    async def ready(_):
        return web.json_response({"status": "ready"})

    app = web.Application()
    app.add_routes([web.get("/ready", ready)])
    runner = web.AppRunner(app)
    await runner.setup()
    context = http_context(ServerTls(files.cert, files.key))
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    address = f"127.0.0.1:{runner.addresses[0][1]}"
    async with aiohttp.ClientSession() as session:
        assert (await probe(session, address, tls=True)).ready
        assert await probe(session, address) is None
    await runner.cleanup()


def test_commands_do_not_show_their_key(monkeypatch, capsys):
    monkeypatch.setenv("QUIRE_API_KEY", "sk-secret")
    settings = parse_settings(GenerateSettings, "quire generate", ["hi"])
    assert settings.api_key.get_secret_value() == "sk-secret"
    with pytest.raises(SystemExit):
        parse_settings(GenerateSettings, "quire generate", ["hi", "--max-tokens=x"])
    assert "sk-secret" not in repr(settings) + "".join(capsys.readouterr())


def test_a_failed_handshake_is_not_reported_as_no_answer():
    said = explain("failed to connect to all addresses; last error: WRONG_VERSION_NUMBER")
    with (
        pytest.raises(CommandError, match=r"cannot be reached: .*--tls-ca"),
        connection_errors("t:1"),
    ):
        raise UnavailableError(said)
    with pytest.raises(CommandError, match="nothing answers"), connection_errors("t:1"):
        raise UnavailableError("failed to connect to all addresses; connection refused")
