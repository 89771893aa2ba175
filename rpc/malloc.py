"""Settings of glibc's malloc, which have no effect with another C library."""

import asyncio
import contextlib
import ctypes
import gc
import resource
from pathlib import Path
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
M_ARENA_MAX: Final = -8
"""mallopt parameters, as in malloc.h."""
_FIRST_WAIT_S: Final = 2.0
_LAST_WAIT_S: Final = 16.0
_GROWTH: Final = 1.02
_MOST_COLLECTED: Final = 30_000
"""In a process with more Python objects than this, `keep_trimmed` collects only garbage among the
newest objects, so that a collection takes at most 50 ms. Measured with 100,000 small objects: to
visit them takes 2 to 7 ms; to free them takes up to 0.17 s, if all are garbage of ended requests.
A process with thousands of live requests has far more than `_MOST_COLLECTED` objects."""


def set_malloc(parameter: int, value: int) -> None:
    """Set a parameter for the whole process."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(parameter, value)


def trim_malloc() -> None:
    """Return free memory to the system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


async def keep_trimmed() -> None:
    """Trim malloc whenever the process has grown, until cancelled.

    Garbage is collected before each trim, because a few objects in reference cycles may keep large
    requests in memory. Python itself would collect such objects only after many more allocations
    (see the thresholds in `rpc.server`).
    """
    least, wait_s = _resident_bytes(), _FIRST_WAIT_S
    while True:
        await asyncio.sleep(wait_s)
        before = _resident_bytes()
        if before > _GROWTH * least:
            gc.collect(2 if len(gc.get_objects()) <= _MOST_COLLECTED else 0)
            await asyncio.to_thread(trim_malloc)
        after = _resident_bytes()
        # Memory that is freed later does not change the resident size, so try again, but less
        # often.
        wait_s = _FIRST_WAIT_S if _GROWTH * after < before else min(2 * wait_s, _LAST_WAIT_S)
        least = min(least, after)


def _resident_bytes() -> int:
    """Return the resident size of this process; 0 if it is unknown."""
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return num_pages * resource.getpagesize()
