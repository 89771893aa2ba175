"""Epochs, which number schedulers. A worker obeys only the scheduler of the newest epoch.

An epoch is the wall clock's time in nanoseconds, or slightly above the newest epoch that the
workers have seen.
"""

import secrets
import time
from typing import Final

from contract.errors import InvalidArgumentError

MAX_LEAD_NS: Final = 366 * 24 * 3600 * 10**9
"""How far an epoch may be ahead of a worker's clock. The limit is generous to inaccurate clocks.
With the limit, a newer epoch is still possible after a bug or an attacker makes a worker obey a
wrong epoch."""
_SPREAD_NS: Final = 2**16
"""Schedulers that start at the same time draw from this many epochs, to get different ones."""


def clock_epoch() -> int:
    """Return the epoch for the current time."""
    return time.time_ns()


def epoch_after(newest: int) -> int:
    """Draw an epoch above `newest`, which workers have seen, for a scheduler that starts now."""
    return max(clock_epoch(), newest + 1) + secrets.randbelow(_SPREAD_NS)


def check_epoch(epoch: int) -> None:
    """Check that a scheduler may have this epoch, by the clock of the caller.

    Raises:
        InvalidArgumentError: The epoch is 0, or too far ahead of the clock.
    """
    most = clock_epoch() + MAX_LEAD_NS
    if not 1 <= epoch <= most:
        raise InvalidArgumentError(
            "epoch",
            f"is {epoch}; it must be in [1, {most}], at most a year ahead of this worker's clock"
            " in nanoseconds since 1970",
        )
