"""Limits the number of connections, so that a process stays below its limit of open files.

At that limit (`ulimit -n`), new connections wait in the kernel, and so do their clients. So servers
refuse connections before the process reaches that limit.
"""

import contextlib
import resource
from typing import Final

_RESERVED: Final = 128
"""Open files left for other uses, such as sockets to other processes; at most half of the limit.
"""


def raise_file_limit() -> None:
    """Raise this process's soft limit to its hard limit, if the system allows it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # the hard limit is above the system's limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections() -> int | None:
    """Return the connection limit for each of a process's servers (gRPC, HTTP); None: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    return max(1, (soft - min(_RESERVED, soft // 2)) // 2)
