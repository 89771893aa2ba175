"""How long a peer has said nothing, though it is to say something every half second.

A process that hangs keeps its connections, and the kernel takes what is sent to it; gRPC's pings
are answered as long as any thread of it runs, also when its loop does not. So whoever depends on a
peer listens for its beats.
"""

BEAT_S = 0.5
"""How often a peer says something at least."""
TICK_S = 0.25
"""How often a listener looks."""
SILENT_AFTER_S = 1.5
"""From then on it is said to hang. With a tick it is less than two seconds."""
LOST_AFTER_S = 5.0
"""From then on nobody waits for it: what it had goes on elsewhere."""


class Silence:
    """Counts the listener's own ticks, not time.

    A listener that was stopped or starved itself, with the peer's beats unread before it, does not
    take the time that it slept for the peer's.
    """

    def __init__(self) -> None:
        self._num_ticks = 0

    def heard(self) -> None:
        """Note that the peer has said something."""
        self._num_ticks = 0

    def tick(self) -> None:
        """Note that `TICK_S` have passed."""
        self._num_ticks += 1

    @property
    def seconds(self) -> float:
        """For how long the peer has been silent."""
        return self._num_ticks * TICK_S

    @property
    def is_hang(self) -> bool:
        """Whether the peer is said to hang."""
        return self.seconds >= SILENT_AFTER_S

    @property
    def is_loss(self) -> bool:
        """Whether the peer is given up."""
        return self.seconds >= LOST_AFTER_S
