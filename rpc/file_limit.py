"""Limits the number of connections, so that a process stays below its limit of open files.

A process at that limit (`ulimit -n`) can neither accept nor refuse connections: new clients wait.
So servers refuse connections before the process reaches that limit.
"""

import contextlib
import resource
from typing import Final

_RESERVED: Final = 128
"""Number of open files that are reserved for uses other than clients' connections, such as sockets
to other processes. If the limit of open files is below 256, half of the limit is reserved."""


def raise_file_limit() -> None:
    """Raise this process's soft limit on open files to the hard limit, if the system allows it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # the hard limit is above the system's limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections() -> int | None:
    """Return the connection limit for each of a process's servers (gRPC, HTTP); None: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    return max(1, (soft - min(_RESERVED, soft // 2)) // 2)
