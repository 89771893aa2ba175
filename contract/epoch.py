"""Epochs: a scheduler's reign over workers, which obey only the newest that they have seen.

An epoch is the wall clock in milliseconds, or one more than what the workers have seen.
"""

import time
from typing import Final

from contract.errors import InvalidArgumentError

MAX_LEAD_MS: Final = 366 * 24 * 3600 * 1000
"""How far an epoch may be ahead of a worker's clock. Clocks need not agree well, but whatever epoch
a stranger or a bug has a worker obey, there must be a newer one."""


MAX_EPOCH: Final = 2**64 - 1
"""The wire's limit."""


def clock_epoch() -> int:
    """Return the epoch for the current time."""
    return time.time_ns() // 1_000_000


def epoch_after(newest: int) -> int:
    """Return the epoch of a scheduler that starts now, when workers have seen `newest`.

    Raises:
        InvalidArgumentError: No newer epoch exists.
    """
    if newest >= MAX_EPOCH:
        raise InvalidArgumentError(
            "epoch", f"is {newest} at a worker, and there is no newer one: restart that worker"
        )
    return max(clock_epoch(), newest + 1)


def check_epoch(epoch: int) -> None:
    """Check that a scheduler may have this epoch, by the clock of the caller.

    Raises:
        InvalidArgumentError: It is 0, or too far ahead.
    """
    most = clock_epoch() + MAX_LEAD_MS
    if not 1 <= epoch <= most:
        raise InvalidArgumentError(
            "epoch",
            f"is {epoch}; it must be in [1, {most}], at most a year ahead of this worker's clock"
            " in milliseconds since 1970",
        )
