"""Opens listening sockets: TCP ports and Unix sockets."""

import contextlib
import errno
import os
import socket
from pathlib import Path
from typing import Final

_BACKLOG: Final = 1024
_WILDCARDS: Final = ("", "0.0.0.0", "::")  # noqa: S104 - the address is the user's


def listen_at(address: str, *, shares_port: bool) -> list[socket.socket]:
    """Listen at all addresses of "host:port"; the host 0.0.0.0 or :: means IPv4 and IPv6.

    Raises:
        OSError: An address is not available.
    """
    host, _, text = address.rpartition(":")
    host, port = host.strip("[]"), int(text)
    is_wildcard = host in _WILDCARDS
    if is_wildcard and socket.has_dualstack_ipv6():
        found = [(socket.AF_INET6, "::")]
    else:
        infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)
        found = list(dict.fromkeys((info[0], str(info[4][0])) for info in infos))
    with contextlib.ExitStack() as opened:
        listening = []
        for family, each in found:
            listener = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listening.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shares_port:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                only = int(not is_wildcard)
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
            listener.bind((each, port))
            listener.listen(_BACKLOG)
            port = listener.getsockname()[1]  # port 0: the other addresses get the first one's port
        opened.pop_all()
    return listening


def free_path(path: Path) -> None:
    """Remove the file of a Unix socket whose process has died.

    Raises:
        OSError: A process listens at the path, or it is unknown whether one does.
    """
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(os.fspath(path))
    if code == errno.ECONNREFUSED:
        path.unlink()
    elif code != errno.ENOENT:  # EAGAIN: the process has not accepted its last clients yet
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), os.fspath(path))


class ListeningPath:
    """A listening Unix socket; replaces the file that a dead process has left at its path."""

    def __init__(self, path: Path) -> None:
        """Start to listen; raises OSError on failure."""
        self._path = path
        free_path(path)
        with contextlib.ExitStack() as opened:
            self.socket = opened.enter_context(socket.socket(socket.AF_UNIX))
            self.socket.bind(str(path))
            self.socket.listen(_BACKLOG)
            opened.pop_all()
        self._inode = path.stat().st_ino

    def remove(self) -> None:
        """Remove the socket's file, unless another process has replaced the file."""
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()
