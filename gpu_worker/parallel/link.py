"""The connection between rank 0 and another rank: a greeting, then commands, until one end dies.

Each end detects at once that the other end has died, even while its own process computes or waits.
A frame is a kind, a length, and that many bytes.
"""

import socket
import struct
import threading
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

_HEADER: Final = struct.Struct("<BI")
_KEEPALIVE: Final = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 25_000,  # milliseconds that sent data may stay unacknowledged
}
"""A machine that disappears silently is noticed after 25 s."""


class Kind(IntEnum):
    """The kind of a frame."""

    HELLO = 1
    """The other rank's first frame: its number and its settings, as JSON."""
    WELCOME = 2
    """Rank 0's first frame: the port of the store by which ranks find each other, as JSON."""
    LAUNCH = 3
    """Launch a step: a StepBatch."""
    COLLECT = 4
    """Collect the oldest launched step."""
    RESET = 5
    """Forget all sequences, and all steps that were not collected."""
    DISTRUST = 7
    """Forget all sequences and labels, because a step has failed."""
    CLOSE = 6
    """End, because rank 0 ends."""
    FAILED = 8
    """The other rank's last frame: why this rank ends, as text."""
    LOAD_ADAPTER = 9
    """Read an adapter while steps continue, and answer with ADAPTER. The content is the adapter's
    name and directory, as JSON."""
    ADAPTER = 10
    """The other rank's answer: the adapter's digest, or why it was not loaded, as JSON."""
    ADD_ADAPTER = 11
    """Let steps use the adapter that LOAD_ADAPTER has read last. The content is the adapter's
    number, as text."""
    REMOVE_ADAPTER = 12
    """Free an adapter as soon as no row uses it. The content is the adapter's number, as text."""


@dataclass(frozen=True, slots=True)
class Frame:
    kind: Kind
    content: bytes = b""


class Link:
    """One end of a connection. Any thread may send, and one thread at a time receives."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._socket = connected
        self._sending = threading.Lock()

    def send(self, frame: Frame) -> None:
        """Send a frame; raises OSError if the connection is closed."""
        with self._sending:
            self._socket.sendall(_HEADER.pack(frame.kind, len(frame.content)) + frame.content)

    def receive(self) -> Frame:
        """Wait for a frame; raises OSError if the connection is closed, or the frame is invalid."""
        kind, num_bytes = _HEADER.unpack(self._read(_HEADER.size))
        try:
            return Frame(Kind(kind), self._read(num_bytes))
        except ValueError:
            raise ConnectionError(f"a frame has the unknown kind {kind}") from None

    def set_timeout(self, seconds: float | None) -> None:
        """Make later calls raise TimeoutError, an OSError, if they wait longer than `seconds`."""
        self._socket.settimeout(seconds)

    def fileno(self) -> int:
        """Return the file descriptor, for a selector."""
        return self._socket.fileno()

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def _read(self, num_bytes: int) -> bytes:
        content = bytearray()
        while len(content) < num_bytes:
            part = self._socket.recv(num_bytes - len(content))
            if not part:
                raise ConnectionError("the other end has closed the connection")
            content += part
        return bytes(content)
