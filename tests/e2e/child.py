"""One process of the service under test, with its flags and its log."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

START_S = 240.0
"""Two workers have taken 60 s on two cores beside eight busy processes, and more beside thirty."""
STOP_S = 60.0

_POLL_S = 0.02

T = TypeVar("T")


def eventually(look: Callable[[], T | None], what: str, within_s: float = START_S) -> T:
    """Calls `look` until it returns something; after `within_s` fails and names `what`."""
    deadline = time.monotonic() + within_s
    while True:
        if (seen := look()) is not None:
            return seen
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(_POLL_S)


class Child:
    """A Quire process in a process group of its own; it can be started again after its end."""

    def __init__(self, module: str, log: Path, env: Mapping[str, str]) -> None:
        self.module = module
        self._log = log
        self._env = dict(env)
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def start(self, flags: Sequence[str]) -> None:
        """Starts it; it is not ready yet."""
        assert self._process is None, f"{self.module} runs already"
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.module, *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**_environment(), **self._env},
                start_new_session=True,
            )

    @property
    def is_started(self) -> bool:
        """Whether it was started and not stopped since."""
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.module} does not run"
        return self._process.pid

    @property
    def log(self) -> str:
        """Its log since the last start."""
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    @property
    def http(self) -> str:
        """Its HTTP address, "host:port"; waits until it has a port."""
        return eventually(self._find_http, f"{self.module} listens", START_S)

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        assert self._process is not None, f"{self.module} does not run"
        return self._process.poll()

    def check_alive(self) -> None:
        """Fails, showing the log, if the process has ended by itself."""
        if self._process is not None and (code := self._process.poll()) is not None:
            raise AssertionError(f"{self.module} has ended with {code}; its log:\n{self.log}")

    def rss_bytes(self) -> int:
        """Its resident memory."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        return int(fields["VmRSS"].split()[0]) * 1024

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills it, as in a crash."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Sends SIGTERM; fails unless it ends in time, with 0, and leaves no process."""
        if self._process is None:
            return
        self.check_alive()
        self.signal(signal.SIGTERM)
        self.wait()

    def wait(self, within_s: float = STOP_S) -> None:
        """Waits for the end after `signal`; checks the same as `stop`."""
        pid = self.pid
        assert self._process is not None
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            log = self.log
            self.kill()
            raise AssertionError(f"{self.module} did not end in {within_s} s:\n{log}") from None
        self._process = None
        assert code == 0, f"{self.module} ended with {code}; its log:\n{self.log}"
        assert not _group_exists(pid), f"{self.module} left processes behind"

    def _find_http(self) -> str | None:
        self.check_alive()
        for line in self.log.splitlines():
            if '"listening"' in line:
                return str(json.loads(line)["http"])
        return None


def _environment() -> dict[str, str]:
    """The tests' environment, without variables that would configure a process of the service."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    return {**ours, "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


def _group_exists(pgid: int) -> bool:
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    return True
