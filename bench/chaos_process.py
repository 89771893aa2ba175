"""One process that is killed, stopped and started again; it ends with the one that started it."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path

_POLL_S = 0.02
_DIE_WITH_PARENT = (  # in a program of its own: to fork under gRPC's threads is not safe
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
)


class Process:
    """A module of Quire that runs, or has run."""

    def __init__(self, name: str, module: str, flags: list[str], http: str, log: Path) -> None:
        """`http` is where it answers, "host:port", as `flags` tell it."""
        self.name = name
        self.http = http
        self._argv = [sys.executable, "-m", module, *flags]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; what it says is added to its log."""
        assert self.exit_code is not None or self._process is None, f"{self.name} runs already"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-ISc", _DIE_WITH_PARENT, *self._argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its id."""
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """As of `subprocess`; None while it runs, or if it was never started."""
        return None if self._process is None else self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self._process is not None and self.exit_code is None:
            os.killpg(self.pid, number)

    async def kill(self) -> None:
        """Kill -9; returns when it is gone."""
        self.signal(signal.SIGKILL)
        await self.wait()

    async def wait(self) -> None:
        """Wait for its end."""
        while self._process is not None and self.exit_code is None:  # noqa: ASYNC110 - no handler
            await asyncio.sleep(_POLL_S)

    async def stop(self, within_s: float) -> None:
        """Ask it to end; kill it if it has not by then."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.wait()
        await self.kill()

    def rss_bytes(self) -> int:
        """Its resident memory."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        return int(fields["VmRSS"].split()[0]) * 1024

    def log_tail(self, num_lines: int = 30) -> str:
        """Give the end of its log."""
        with self._log.open(errors="replace") as lines:
            return "".join(deque(lines, maxlen=num_lines))
