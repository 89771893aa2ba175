"""Checks and chooses TCP ports."""

import contextlib
import errno
import os
import socket
from collections.abc import Collection

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - not bound here


class PortError(Exception):
    """A port cannot be used. The message names the flag and its value."""


def join(host: str, port: int) -> str:
    """Join host and port as gRPC and URLs require."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reachable(host: str) -> str:
    """Return the address at which this machine reaches a server that listens on `host`."""
    return _WILDCARDS.get(host, host)


def require_free(host: str, port: int, flag: str) -> int:
    """Return `port`, or a free port if `port` is 0; raises PortError if `port` is in use."""
    try:
        return _bind(host, port)
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0)
        raise PortError(f"{flag}: {port}: {reason} on {host}") from None


def prefer(host: str, port: int, taken: Collection[int]) -> int:
    """Return `port` if it is neither 0, in use nor in `taken`; else a free port not in `taken`."""
    if port not in taken and 0 < port <= 65535:  # noqa: PLR2004 - the largest port
        with contextlib.suppress(OSError):
            return _bind(host, port)
    while (free := _bind(host, 0)) in taken:  # chosen before, but nothing listens there yet
        pass
    return free


def _bind(host: str, port: int) -> int:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise PortError(f"--host: {host}: {error.strerror}") from None
    with socket.socket(family, kind, protocol) as probe:
        # A port that has only connections in TIME_WAIT counts as free, as it does for our servers.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        bound: int = probe.getsockname()[1]
        return bound
