"""Retries of a client: a policy for each request, and a budget for all requests together."""

import random
import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retry:
    """How often a client repeats a failed call, and how long it waits before each retry.

    If a busy service says how long to wait, the client waits at least that long.
    """

    max_attempts: int = 5
    """Maximum number of calls for a request that is refused because the service is too busy or
    unavailable."""
    first_backoff_s: float = 0.05
    """The longest wait after the first failure. This time doubles with each further failure in a
    row, up to `max_backoff_s`. The client waits a random time, from half of this
    longest wait up to all of it."""
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
    """Stops retries while many calls of a client fail. Thread-safe.

    The method is gRPC's retry throttling (gRFC A6). A bucket holds `capacity` tokens. Each failed
    call takes one token out, and each call that succeeds puts a tenth of a token back. The client
    retries only while the bucket is more than half full. So in the long run, retries
    add at most a tenth to the calls.
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
