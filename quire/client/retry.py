"""How often a client tries again: a policy for each call, and a budget for all of them."""

import random
import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retry:
    """When a call that failed is made again.

    A service that is too busy says when to come back, and is not asked sooner.
    """

    max_attempts: int = 5
    """Of a call that was refused because the service is too busy, or not available."""
    first_backoff_s: float = 0.05
    """Doubled at each attempt in a row; half of it is left to chance."""
    max_backoff_s: float = 1.0
    resume_within_s: float = 30.0
    """How long a resumable stream that broke is tried to be resumed before it fails."""

    def backoff_s(self, num_failures: int) -> float:
        """Say how long to wait after so many failures in a row."""
        doubled_s = self.first_backoff_s * 2.0 ** min(num_failures - 1, 16)
        backoff_s = min(doubled_s, self.max_backoff_s)
        return backoff_s * random.uniform(0.5, 1.0)  # noqa: S311 - spreads clients, guards nothing


NO_RETRY = Retry(max_attempts=1)


class RetryBudget:
    """Lets all calls of a client together retry only while most of them succeed.

    Each failure costs one of `capacity` tokens and each success gives a tenth back; there are no
    retries while no more than half are left. So a service that has failed for long gets at most a
    tenth more calls. It is gRPC's own retry throttling (gRFC A6). Threads may share it.
    """

    def __init__(self, capacity: float = 10.0) -> None:
        self._capacity = capacity
        self._tokens = capacity
        self._lock = threading.Lock()

    def succeeded(self) -> None:
        """Count a call that was accepted."""
        with self._lock:
            self._tokens = min(self._capacity, self._tokens + 0.1)

    def failed(self) -> bool:
        """Count a call that was refused; say whether there may be a retry."""
        with self._lock:
            self._tokens = max(0.0, self._tokens - 1)
            return self._tokens > self._capacity / 2
