"""How many connections the limit of open files (`ulimit -n`) has room for.

At the limit, a connection that cannot be accepted waits in the kernel, and its client with it. So
servers refuse connections before that.
"""

import contextlib
import resource
from typing import Final

_RESERVED: Final = 128
"""For files, sockets to other processes, and what libraries open; at most half of the limit."""


def raise_file_limit() -> None:
    """Raise this process's soft limit to the hard one, as far as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a hard limit above the system's own
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections() -> int | None:
    """Return the most connections of one of a process's two servers, gRPC and HTTP; None: any."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    return max(1, (soft - min(_RESERVED, soft // 2)) // 2)
