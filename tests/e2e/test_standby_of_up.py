"""`quire up --standby`: a scheduler that is stopped, but not killed, does not stop the service."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.child import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

_SERVING = re.compile(r"│ (scheduler-\d) +│ (\d+) +│ ready +│")
_STANDING_BY = re.compile(r"│ scheduler-\d +│ (\d+) +│ ready, but it stands by +│")


class Up:
    """A simulated service of `quire up`, and the commands about it."""

    def __init__(self, directory: Path) -> None:
        self._environment = os.environ | {"TMPDIR": str(directory), "COLUMNS": "120"}

    def quire(self, *argv: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "quire.cli", *argv],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout


@pytest.fixture
def up() -> Iterator[Up]:
    with tempfile.TemporaryDirectory(prefix="q-") as directory:
        up = Up(Path(directory))
        ports = ("--http-port", "0", "--grpc-port", "0")
        said = up.quire("up", "--simulate", "1", "--standby", "--detach", *ports)
        assert "is up after" in said, said
        yield up
        up.quire("down")


def test_the_other_scheduler_takes_over_from_one_that_is_stopped(up):
    eventually(lambda: _STANDING_BY.search(up.quire("status")), "one stands by")
    served = _SERVING.search(up.quire("status"))
    assert served is not None
    pid = int(served[2])
    os.kill(pid, signal.SIGSTOP)
    try:
        said = up.quire("generate", "x", "--max-tokens", "2", "--timeout-s", "30")
        assert not said.startswith("quire: "), said
        other = _SERVING.search(up.quire("status"))
        assert other is not None
        assert other[1] != served[1]
        assert "blocks moved" in up.quire("defragment")
    finally:
        os.kill(pid, signal.SIGCONT)

    def new_standby() -> bool | None:
        found = _STANDING_BY.search(up.quire("status"))
        return (found is not None and int(found[1]) != pid) or None

    eventually(new_standby, "the scheduler that was stopped has started again, and stands by")
