"""TCP ports: whether one is free, and which one is."""

import contextlib
import errno
import os
import socket
from collections.abc import Collection

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - not bound here


class PortError(Exception):
    """A port that was asked for cannot be had. The message names the flag and the port."""


def join(host: str, port: int) -> str:
    """Write an address as gRPC and URLs want it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reachable(host: str) -> str:
    """Give the address at which this machine reaches what listens on `host`."""
    return _WILDCARDS.get(host, host)


def require_free(host: str, port: int, flag: str) -> int:
    """Give `port`, or a free one if it is 0; raise PortError naming `flag` if it cannot be had."""
    try:
        return _bind(host, port)
    except socket.gaierror as error:
        raise PortError(f"--host: {host}: {error.strerror}") from None
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0)
        raise PortError(f"{flag}: {port}: {reason} on {host}") from None


def prefer(host: str, port: int, taken: Collection[int]) -> int:
    """Give `port` if it is free and not in `taken`, else, or if it is 0, any free one."""
    if port not in taken and 0 < port <= 65535:  # noqa: PLR2004 - the last one
        with contextlib.suppress(OSError):
            return _bind(host, port)
    while (free := _bind(host, 0)) in taken:  # nobody listens there yet
        pass
    return free


def _bind(host: str, port: int) -> int:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        # A port that only waits out its last connections is free, as it is to our servers.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        bound: int = probe.getsockname()[1]
        return bound
