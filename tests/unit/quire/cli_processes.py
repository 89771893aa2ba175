"""What the tests of the command line ask the machine about processes."""

import time
from collections.abc import Callable
from pathlib import Path

TIMEOUT_S = 240.0
"""Generous: four interpreters start, at times beside many other tests."""


def is_alive(pid: int) -> bool:
    """A zombie is not: its parent only has not looked yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def until(condition: Callable[[], object]) -> None:
    """Poll for what another process does."""
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)
