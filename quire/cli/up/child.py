"""One child process: started so that it cannot outlive its parent, logging to a file."""

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

_POLL_S: Final = 0.05
_BECOME: Final = """\
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(ignored_by_python, signal.SIG_DFL)
parent, program, *argv = sys.argv[1:]
if os.getppid() == int(parent):  # else it was gone before the kernel was told
    os.execv(program, argv)
"""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run."""

    name: str
    argv: tuple[str, ...]
    http_address: str
    """Where its probes answer, "host:port"."""
    stop_group: int = 0
    """Processes stop in ascending order of group; those of one group stop together."""
    environment: Mapping[str, str] = field(default_factory=dict)


class Child:
    """A running process in a session of its own, so that the terminal's signals pass it by.

    Its end is a file's that becomes readable, or is polled for where the system has no such files:
    no thread and no handler for SIGCHLD, which makes it safe to fork beside.
    """

    def __init__(self, spec: ProcessSpec, process: subprocess.Popen[bytes], log_file: Path) -> None:
        self.spec = spec
        self.log_file = log_file
        self._process = process

    @classmethod
    def start(cls, spec: ProcessSpec, log_file: Path) -> Self:
        """Start it; its output is appended to `log_file`. Raises OSError if there is no program."""
        with log_file.open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 - the layout's own command lines
                _until_parent_ends(spec.argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(spec.environment) or None,
                start_new_session=True,
            )
        return cls(spec, process, log_file)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """As of `subprocess`: minus the signal's number if one ended it; None while it runs."""
        return self._process.poll()

    async def wait(self) -> int:
        """Wait for its end; give the exit code."""
        return await wait_for(self._process)

    def terminate(self) -> None:
        """Ask it to drain and end."""
        if self.exit_code is None:
            self._process.terminate()

    def kill(self) -> None:
        """End it, and whatever it started that is still in its session's process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def log_tail(self, num_lines: int) -> list[str]:
        """Give the last lines of its log."""
        return tail(self.log_file, num_lines)


async def wait_for(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process's end; give the exit code."""
    if process.poll() is None:
        await _told_of_end(process.pid)
    while (code := process.poll()) is None:  # noqa: ASYNC110 - see Child
        await asyncio.sleep(_POLL_S)
    return code


async def _told_of_end(pid: int) -> None:
    """Wait until a child has ended, at no cost meanwhile; return at once if the system cannot."""
    if sys.platform != "linux":
        return
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:  # an old kernel, or a sandbox that forbids it
        return
    loop = asyncio.get_running_loop()
    has_ended = asyncio.Event()
    loop.add_reader(pidfd, has_ended.set)
    try:
        await has_ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def tail(file: Path, num_lines: int) -> list[str]:
    """Give the last lines of a file; none if there is no such file."""
    try:
        with file.open(errors="replace") as lines:
            return [line.rstrip("\n") for line in deque(lines, maxlen=num_lines)]
    except FileNotFoundError:
        return []


def describe_exit(code: int) -> str:
    """Say how a process ended, for a person."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _until_parent_ends(argv: tuple[str, ...]) -> tuple[str, ...]:
    """The command that runs `argv` so that the kernel ends it with this process.

    Linux only; elsewhere a parent that is killed outright leaves its children. It is a program that
    becomes the other one, since code that runs between fork and exec here would need a real fork,
    which hangs at times in a process with gRPC's threads.

    Raises:
        FileNotFoundError: There is no such program.
    """
    if (program := shutil.which(argv[0])) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])
    if sys.platform != "linux":
        return argv
    return sys.executable, "-ISc", _BECOME, str(os.getpid()), program, *argv
