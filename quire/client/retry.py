"""Retries of a client: a policy for each request, and a budget for all requests together."""

import random
import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retry:
    """When to repeat a failed call: never sooner than a busy service asks for."""

    max_attempts: int = 5
    """Maximum number of calls for a request that is refused because the service is too busy or
    unavailable."""
    first_backoff_s: float = 0.05
    """The first wait, which doubles with each failure in a row. Each wait is random: between half
    of that time and all of it."""
    max_backoff_s: float = 1.0
    resume_within_s: float = 30.0
    """How long the client tries to resume a broken stream."""

    def backoff_s(self, num_failures: int) -> float:
        """Return the wait after `num_failures` failures in a row."""
        doubled_s = self.first_backoff_s * 2.0 ** min(num_failures - 1, 16)
        backoff_s = min(doubled_s, self.max_backoff_s)
        return backoff_s * random.uniform(0.5, 1.0)  # noqa: S311 - not for security


NO_RETRY = Retry(max_attempts=1)


class RetryBudget:
    """Stops retries while most calls of a client fail. Thread-safe.

    The method is gRPC's retry throttling (gRFC A6). Each failure costs one of `capacity` tokens,
    each success returns a tenth of a token, and nothing is retried while half the tokens or fewer
    are left. So a service that keeps failing gets at most a tenth more calls.
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
        """Count a call that was refused; return whether it may be retried."""
        with self._lock:
            self._tokens = max(0.0, self._tokens - 1)
            return self._tokens > self._capacity / 2
