"""Epochs, which number schedulers. A worker obeys only the scheduler of the newest epoch.

A scheduler's epoch is the time of its start, in nanoseconds since 1970. If a worker has already
seen a greater epoch, for example because clocks differ, the scheduler's epoch is slightly above the
greatest epoch that a worker has seen.
"""

import secrets
import time
from typing import Final

from contract.errors import InvalidArgumentError

MAX_LEAD_NS: Final = 366 * 24 * 3600 * 10**9
"""How far an epoch may be ahead of a worker's clock. The limit leaves room for clocks that are
wrong. Without a limit, a bug or an attacker could make a worker obey the greatest possible epoch,
and the worker would refuse every later scheduler."""
_SPREAD_NS: Final = 2**16
"""A new scheduler adds a random number below `_SPREAD_NS` to its epoch. So schedulers that start at
the same time get different epochs, with high probability."""


def clock_epoch() -> int:
    """Return the epoch for the current time."""
    return time.time_ns()


def epoch_after(newest: int) -> int:
    """Draw an epoch for a new scheduler; `newest` is the newest epoch that workers have seen."""
    return max(clock_epoch(), newest + 1) + secrets.randbelow(_SPREAD_NS)


def check_epoch(epoch: int) -> None:
    """Check against this machine's clock that a scheduler may have this epoch.

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
