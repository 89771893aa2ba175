"""Reads the state of processes, for the tests of the command line."""

import time
from collections.abc import Callable
from pathlib import Path

TIMEOUT_S = 240.0
"""Long, because four interpreters start, at times beside many other tests."""


def is_alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not run; its parent has not reaped it yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def until(condition: Callable[[], object]) -> None:
    """Poll until another process has made the condition true."""
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)
