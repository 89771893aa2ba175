"""What a client of the HTTP/2 server may use."""

from dataclasses import dataclass
from typing import Final

from rpc.transport import PATIENT, Pings

_REFILL_PER_S: Final = 100.0
_SPARE_FRAMES: Final = 1000


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a connection and its calls."""

    max_received_bytes: int
    """Largest request message, inflated."""
    max_sent_bytes: int
    """Largest response message."""
    max_metadata_bytes: int
    """Largest metadata of a request, as HTTP/2 counts: 32 bytes more for each field."""
    max_concurrent_streams: int
    """Most calls of a connection whose handlers run."""
    max_connections: int | None = None
    """None: no limit."""
    pings: Pings = PATIENT


class FrameBudget:
    """How many frames without a request or data a client may still send.

    PING, SETTINGS, RST_STREAM and the like cost processor time, and a client could send them
    without end ("rapid reset", CVE-2023-44487). A client earns one for each frame that it gets, and
    some with time.
    """

    def __init__(self, max_concurrent_streams: int, now: float) -> None:
        self._most = float(_SPARE_FRAMES + max_concurrent_streams)
        self._left = self._most
        self._at = now

    def earn(self, num_frames: int) -> None:
        """Count frames that were sent to the client."""
        self._left = min(self._left + num_frames, self._most)

    def spend(self, num_frames: int, now: float) -> bool:
        """Count frames from the client; False: they were too many."""
        self._left = min(self._left + (now - self._at) * _REFILL_PER_S, self._most) - num_frames
        self._at = now
        return self._left >= 0
