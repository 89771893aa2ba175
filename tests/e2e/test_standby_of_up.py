"""`quire up --standby`: a scheduler that is stopped, but not killed, does not stop the service."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.cli.up.service_dir import ServiceProcess, running_services
from tests.e2e.child import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

_STANDS_BY = "ready, but it stands by"


class Up:
    """A simulated service of `quire up`."""

    def __init__(self, directory: Path) -> None:
        self._root = directory / f"quire-{os.getuid()}"
        self._environment = os.environ | {"TMPDIR": str(directory)}

    def quire(self, *argv: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "quire.cli", *argv],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        return done.stdout

    def scheduler(self, status: str) -> ServiceProcess | None:
        """Return the scheduler that has this status."""
        (service,) = running_services(self._root)
        schedulers = [each for each in service.processes if each.name.startswith("scheduler")]
        assert len(schedulers) == 2
        found = [each for each in schedulers if _status(each.http_address) == status]
        return found[0] if len(found) == 1 else None


def _status(http_address: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{http_address}/ready", timeout=1) as answer:
            status: str = json.load(answer)["status"]
    except OSError:
        return "does not answer"
    return status


@pytest.fixture
def up() -> Iterator[Up]:
    with tempfile.TemporaryDirectory(prefix="q-") as directory:
        up = Up(Path(directory))
        ports = ("--http-port", "0", "--grpc-port", "0")
        said = up.quire("up", "--simulate", "1", "--standby", "--detach", *ports)
        assert "is up after" in said, said
        yield up
        up.quire("down")


def test_the_other_scheduler_takes_over_from_one_that_is_stopped(up: Up) -> None:
    eventually(lambda: up.scheduler(_STANDS_BY), "one stands by")
    served = eventually(lambda: up.scheduler("ready"), "one serves")
    os.kill(served.pid, signal.SIGSTOP)
    try:
        other = eventually(lambda: up.scheduler("ready"), "the other one serves")
        assert other.name != served.name
        said = up.quire("generate", "x", "--max-tokens", "2", "--timeout-s", "60")
        assert not said.startswith("quire: "), said
    finally:
        os.kill(served.pid, signal.SIGCONT)
    again = eventually(lambda: up.scheduler(_STANDS_BY), "the stopped one starts again")
    assert (again.name, again.num_restarts) == (served.name, 1)
