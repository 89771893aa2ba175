"""Limits on the messages, frames, calls and connections of the HTTP/2 server's clients."""

from dataclasses import dataclass
from typing import Final

from rpc.transport import PATIENT, Pings

_REFILL_PER_S: Final = 100.0
_SPARE_FRAMES: Final = 1000


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of a connection and its calls."""

    max_received_bytes: int
    """Largest request message, after decompression."""
    max_sent_bytes: int
    """Largest response message."""
    max_metadata_bytes: int
    """Largest metadata of a request. As in HTTP/2, each header counts 32 bytes beyond its text."""
    max_concurrent_streams: int
    """Maximum number of handlers that run at once for one connection."""
    max_connections: int | None = None
    """Maximum number of connections that the server has open; None: no limit."""
    pings: Pings = PATIENT
    accepts_compressed: bool = False
    """Whether request messages may be compressed."""


class FrameBudget:
    """Limits how many frames without a request or data a client may send.

    PING, SETTINGS, RST_STREAM and the like cost CPU time, and a client could send them without end
    ("rapid reset", CVE-2023-44487). So the client has a budget of such frames. The budget grows by
    one for each frame that the server sends, and by 100 per second, up to a limit.
    """

    def __init__(self, max_concurrent_streams: int, now: float) -> None:
        self._most = float(_SPARE_FRAMES + max_concurrent_streams)
        self._left = self._most
        self._at = now

    def earn(self, num_frames: int) -> None:
        """Increase the budget, because frames were sent to the client."""
        self._left = min(self._left + num_frames, self._most)

    def spend(self, num_frames: int, now: float) -> bool:
        """Subtract frames that the client has sent; return whether the budget was large enough."""
        self._left = min(self._left + (now - self._at) * _REFILL_PER_S, self._most) - num_frames
        self._at = now
        return self._left >= 0
