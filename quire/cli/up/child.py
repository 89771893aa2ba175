"""A child process that logs to a file and, on Linux, cannot outlive its parent."""

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

_BECOME: Final = """\
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(ignored_by_python, signal.SIG_DFL)
parent, program, *argv = sys.argv[1:]
if os.getppid() == int(parent):  # else the parent ended before prctl took effect
    os.execv(program, argv)
"""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to run."""

    name: str
    argv: tuple[str, ...]
    http_address: str
    """The address at which the process answers probes, "host:port"."""
    stop_group: int = 0
    """Processes with a lower number stop first; processes with the same number stop together."""
    environment: Mapping[str, str] = field(default_factory=dict)
    harmless_exit_code: int | None = None
    """If the process ends with this exit code during the service's start, it is started again."""


class Child:
    """A process in a separate session, which gets no signals from the terminal."""

    def __init__(
        self, spec: ProcessSpec, process: asyncio.subprocess.Process, log_file: Path
    ) -> None:
        self.spec = spec
        self._process = process
        self._log_file = log_file

    @classmethod
    async def start(cls, spec: ProcessSpec, log_file: Path) -> Self:
        """Start the process; append its output to `log_file`. May raise OSError."""
        with log_file.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *_until_parent_ends(spec.argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(spec.environment) or None,
                start_new_session=True,
            )
        return cls(spec, process, log_file)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative after a signal; None while the process runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for the end of the process; return the exit code."""
        return await self._process.wait()

    def terminate(self) -> None:
        """Ask the process to drain and end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Kill the whole process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def log_tail(self, num_lines: int) -> list[str]:
        """Return the last lines of the log."""
        with self._log_file.open(errors="replace") as lines:
            return [line.rstrip("\n") for line in deque(lines, maxlen=num_lines)]


def describe_exit(code: int) -> str:
    """Describe how a process ended."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _until_parent_ends(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command that runs `argv` and that the kernel kills when this process ends.

    Only Linux kills the command; on other systems, children survive when their parent is killed. On
    Linux the command is a short Python program (`_BECOME`), which asks the kernel to send it
    SIGKILL when its parent ends, and then becomes `argv` by `execv`. The argument `preexec_fn` of
    `subprocess` is not used, because it would run Python between fork and exec, which may hang in a
    process with threads.

    Raises:
        FileNotFoundError: There is no program `argv[0]`.
    """
    if (program := shutil.which(argv[0])) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])
    if sys.platform != "linux":
        return argv
    return sys.executable, "-ISc", _BECOME, str(os.getpid()), program, *argv
