"""A whole service on TCP, for the clients in other languages."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.errors import QuireError
from quire.cli.up import ports
from quire.client import Client, Model
from tests.e2e.child import START_S, STOP_S, eventually

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.clients)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The service's address as host:port, which clients in every language accept."""
    port = ports.require_free("127.0.0.1", 0, "--grpc-port")
    log = tmp_path_factory.mktemp("service") / "log"
    flags = ("--http-port=0", "--scheduler-http-port=0", "--worker-http-port=0", "--device=cpu")
    with log.open("wb") as output:
        service = subprocess.Popen(
            [sys.executable, "-m", "quire.cli", "up", "--attached", f"--grpc-port={port}", *flags],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    assert service.stdin is not None
    try:
        with Client(f"127.0.0.1:{port}") as client:

            def models() -> tuple[Model, ...] | None:
                assert service.poll() is None, log.read_text()
                try:
                    return client.models(timeout_s=1) or None
                except QuireError:
                    return None

            eventually(models, "the service is ready", START_S)
        yield f"127.0.0.1:{port}"
        service.stdin.close()
        assert service.wait(STOP_S) == 0
    finally:
        service.kill()
        service.wait()
