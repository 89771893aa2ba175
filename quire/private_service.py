"""A private service: `quire up` as a child process that ends with this process."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from contract.errors import DeadlineExceededError, UnavailableError
from quire.client import Client
from quire.client.closes import Closes

_POLL_S: Final = 0.1
_STOP_S: Final = 30.0
_LOG_LINES: Final = 20
_USAGE_ERROR: Final = 2


class ServiceStartError(Exception):
    """The service ended before it was ready. The message contains the service's last log lines."""


class PrivateService(Closes):
    """Router, scheduler and workers behind a private Unix socket.

    They run under `quire up`, a child process that ends when the pipe to its standard input is
    closed. `close` closes the pipe; if this process is killed, the kernel closes the pipe. The
    child process has a Unix session of its own, so Ctrl-C in the terminal interrupts only this
    process, and not the service.
    """

    def __init__(self, flags: Mapping[str, object], api_key: str = "") -> None:
        """Start the service with flags of `quire up`, and wait until it is ready.

        If `api_key` is set, every call must have this key. May raise ServiceStartError.
        """
        directory = Path(tempfile.mkdtemp(prefix="quire-"))
        self._log = directory / "log"
        socket = directory / "grpc.sock"
        self.target: Final = f"unix:{socket}"
        ports = {"http_port": 0, "scheduler_http_port": 0, "worker_http_port": 0}
        fixed = {"uds": socket, "attached": True, "detach": False, "demo": False}
        # Pass all settings as flags, because flags override the environment.
        arguments = _arguments({**ports, **flags, **fixed})
        key = {"QUIRE_API_KEY": api_key} if api_key else {}  # other users can see a command line
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own
                [sys.executable, "-P", "-m", "quire.cli", "up", *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **key},
            )
        # Also called when the interpreter exits, or when this object is garbage-collected.
        self._close = weakref.finalize(self, _end, self._process, directory, os.getpid())
        try:
            self._wait_until_ready(api_key)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process id of `quire up`."""
        return self._process.pid

    def close(self) -> None:
        """Stop the service, and wait until its processes have ended; may be called again."""
        self._close()

    def _wait_until_ready(self, api_key: str) -> None:
        with Client(self.target, api_key=api_key) as client:
            while True:
                if self._process.poll() is not None:
                    raise ServiceStartError(self._last_words())
                with contextlib.suppress(UnavailableError, DeadlineExceededError):  # still starting
                    if client.models(timeout_s=1.0):
                        return
                time.sleep(_POLL_S)

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines() or ["quire up has ended"]
        if self._process.returncode == _USAGE_ERROR:
            return lines[-1]  # the earlier lines list all flags
        return "\n".join(lines[-_LOG_LINES:])


def _arguments(flags: Mapping[str, object]) -> list[str]:
    arguments = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            arguments.append(f"--{flag}={value}")
    return arguments


def _end(process: subprocess.Popen[bytes], directory: Path, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of the owner must not stop the service when it exits
    assert process.stdin is not None, "standard input is a pipe"
    process.stdin.close()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()  # its child processes end with it
        process.wait()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
