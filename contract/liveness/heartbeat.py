"""Heartbeats: how a process notices that a peer hangs or is lost.

Every peer sends a message at least every `BEAT_S`. An open connection does not prove that the
peer works: a hanging process keeps its connections, and the kernel accepts data for the process. An
answer to a gRPC ping does not prove it either: gRPC answers pings while any thread of a process
runs, even if the event loop hangs.
"""

BEAT_S = 0.25
"""Longest time between two messages of a healthy peer."""
TICK_S = 0.1
"""How often a process checks whether a peer is silent."""
SILENT_AFTER_S = 1.0
"""A peer that is silent for this long counts as hanging."""
LOST_AFTER_S = 5.0
"""A peer that is silent for this long counts as lost, unless a setting has another limit."""


class Heartbeat:
    """Measures how long one peer has been silent, in ticks of this process, not in clock time.

    While this process is stopped, it makes no ticks, and messages from the peer stay unread. This
    time does not count as silence.
    """

    def __init__(self, lost_after_s: float | None = None) -> None:
        """`lost_after_s`: the silence after which the peer is lost; None: `LOST_AFTER_S`."""
        self._lost_after_s = LOST_AFTER_S if lost_after_s is None else lost_after_s
        self._num_ticks = 0

    def on_message(self) -> None:
        """Reset the count: the peer has sent a message."""
        self._num_ticks = 0

    def on_tick(self) -> None:
        """Count a tick: another `TICK_S` seconds have passed in this process."""
        self._num_ticks += 1

    @property
    def silent_s(self) -> float:
        """How long the peer has been silent, in seconds."""
        return round(self._num_ticks * TICK_S, 3)

    @property
    def is_hanging(self) -> bool:
        """Whether the peer seems to hang; it may recover."""
        return self.silent_s >= SILENT_AFTER_S

    @property
    def is_lost(self) -> bool:
        """Whether the peer counts as lost."""
        return self.silent_s >= self._lost_after_s
