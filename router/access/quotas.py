"""Quotas of tenants: requests and tokens per minute, and requests and tokens in flight.

Each router counts on its own. When a request begins, its tenant is charged for the prompt and the
maximum number of output tokens. When the request ends, the output tokens that it did not produce
are refunded.

If the client of a resumable request leaves, the request may go on at the scheduler, and the router
does not learn when the request ends. So the router counts the request's tokens as in flight for
the longest time that a scheduler runs a request without a client (`Schedulers.resume_grace_s`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from contract.errors import InvalidArgumentError, QuotaError

_MINUTE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of a tenant; None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Tokens of prompts and outputs."""
    max_concurrent_requests: int | None = None
    max_tokens_in_flight: int | None = None
    """Tokens of live requests: their prompts, and the maximum lengths of their outputs."""


class TokenBucket:
    """A token bucket that holds one minute's quota and starts full; its level may be negative."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.capacity = float(per_minute)
        self._level = self.capacity
        self._at = now

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until the bucket has `amount`.

        If `amount` exceeds the capacity, return the seconds until the bucket is full.
        """
        self._refill(now)
        lacking = min(amount, self.capacity) - self._level
        return max(0.0, lacking) * _MINUTE_S / self.capacity

    def take(self, amount: float, now: float) -> None:
        """Take `amount`, even if less is available."""
        self._refill(now)
        self._level -= amount

    def refund(self, amount: float) -> None:
        """Refund a part of the taken amount."""
        self._level = min(self.capacity, self._level + amount)

    def _refill(self, now: float) -> None:
        gained = (now - self._at) * self.capacity / _MINUTE_S
        self._level = min(self.capacity, self._level + gained)
        self._at = now


@dataclass(slots=True, eq=False)
class Meter:
    """Counts one tenant's use against its quota. Times are in seconds on the event loop's clock."""

    tenant: str
    quota: Quota
    now: float
    """The time of creation."""
    num_live: int = 0
    num_tokens_in_flight: int = 0
    """Tokens of live requests, and of requests that may go on although their client has left."""
    _left: dict[str, tuple[float, int]] = field(init=False, default_factory=dict)
    """Maps the id of a request whose client has left to the time until which the request's tokens
    stay in flight, and to the number of these tokens."""
    _requests: TokenBucket | None = field(init=False, default=None)
    _tokens: TokenBucket | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.quota.requests_per_minute is not None:
            self._requests = TokenBucket(self.quota.requests_per_minute, self.now)
        if self.quota.tokens_per_minute is not None:
            self._tokens = TokenBucket(self.quota.tokens_per_minute, self.now)

    def begin(self, now: float, *, is_free: bool = False) -> "QuotaShare":
        """Count a request as live until the returned `QuotaShare` ends.

        If `is_free`, the request is never refused, and takes nothing from `requests_per_minute`.

        Raises:
            QuotaError: The quota is used up; nothing is counted.
        """
        if not is_free:
            self._check_requests(now)
            if self._requests is not None:
                self._requests.take(1, now)
        self.num_live += 1
        return QuotaShare(self)

    def check(self, num_tokens: int, now: float) -> None:
        """Check that a request of at least `num_tokens` could begin; nothing is counted.

        Raises:
            QuotaError: The quota is used up.
        """
        self._check_requests(now)
        if self._tokens is not None:
            self._check_tokens(self._tokens, num_tokens, now)

    def _check_requests(self, now: float) -> None:
        limit = self.quota.max_concurrent_requests
        if limit is not None and self.num_live >= limit:
            raise QuotaError(
                f"tenant {self.tenant!r} has {self.num_live} live requests;"
                f" max_concurrent_requests is {limit}"
            )
        if self._requests is not None and (wait_s := self._requests.wait_s(1, now)):
            raise QuotaError(
                f"tenant {self.tenant!r} has used up its requests_per_minute,"
                f" {self.quota.requests_per_minute}",
                wait_s,
            )

    def reserve(self, num_tokens: int, now: float) -> None:
        """See `QuotaShare.reserve`."""
        limit = self.quota.max_tokens_in_flight
        if limit is not None:
            self._forget_left(now)
            if num_tokens > limit:
                raise InvalidArgumentError(
                    "max_tokens",
                    f"makes this request need {num_tokens} tokens for prompt and outputs; the"
                    f" max_tokens_in_flight of tenant {self.tenant!r} is {limit}",
                )
            if self.num_tokens_in_flight + num_tokens > limit:
                raise QuotaError(
                    f"tenant {self.tenant!r} has {self.num_tokens_in_flight} tokens in flight; with"
                    f" {num_tokens} more it would exceed its max_tokens_in_flight, {limit}"
                )
        if self._tokens is not None:
            # A request for more tokens than a minute's quota starts when the bucket is full; the
            # level is negative afterwards.
            self._check_tokens(self._tokens, num_tokens, now)
            self._tokens.take(num_tokens, now)
        self.num_tokens_in_flight += num_tokens

    def _check_tokens(self, bucket: TokenBucket, num_tokens: int, now: float) -> None:
        if wait_s := bucket.wait_s(num_tokens, now):
            raise QuotaError(
                f"tenant {self.tenant!r} does not have {num_tokens} tokens left of its"
                f" tokens_per_minute, {self.quota.tokens_per_minute}",
                wait_s,
            )

    def end(self, num_in_flight: int, num_unused: int) -> None:
        """Stop counting a request; refund the tokens that it has not used."""
        self.num_live -= 1
        self.num_tokens_in_flight -= num_in_flight
        if self._tokens is not None:
            self._tokens.refund(num_unused)

    def leave(self, request_id: str, num_in_flight: int, now: float, until: float) -> None:
        """Stop counting a request as live, but keep its tokens in flight until the time `until`."""
        self.num_live -= 1
        if self.quota.max_tokens_in_flight is None:
            self.num_tokens_in_flight -= num_in_flight
            return
        self._forget_left(now)
        self.take_up(request_id)  # forget an older request with this id
        self._left[request_id] = until, num_in_flight

    def take_up(self, request_id: str, num_tokens: int = 0) -> None:
        """Count `num_tokens` in flight for a request, instead of those that `leave` kept for it."""
        _, num_left = self._left.pop(request_id, (0.0, 0))
        self.num_tokens_in_flight += num_tokens - num_left

    def _forget_left(self, now: float) -> None:
        for request_id in [name for name, (until, _) in self._left.items() if until <= now]:
            self.take_up(request_id)


class QuotaShare:
    """A request's share of its tenant's quota, while the request is live."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._num_in_flight = 0
        self._num_charged = 0

    def reserve(self, num_tokens: int, now: float) -> None:
        """Charge for the prompt and the maximum number of output tokens; called once.

        Raises:
            InvalidArgumentError: The request alone exceeds the quota.
            QuotaError: Too little of the quota is left now.
        """
        self._meter.reserve(num_tokens, now)
        self._num_in_flight = self._num_charged = num_tokens

    def take_up(self, request_id: str, num_tokens: int) -> None:
        """Count a resumed request's tokens as in flight.

        The tenant was charged for these tokens when the request began.
        """
        self._meter.take_up(request_id, num_tokens)
        self._num_in_flight = num_tokens

    def end(self, num_tokens: int) -> None:
        """End the share. Of the reserved tokens, `num_tokens` were used; refund the rest.

        Each share is ended once, by this method or by `leave`.
        """
        self._meter.end(self._num_in_flight, max(0, self._num_charged - num_tokens))

    def leave(self, request_id: str, now: float, until: float) -> None:
        """End the share, but keep the request's tokens in flight until the time `until`.

        Called instead of `end` if the client has left but the request may go on. Nothing is
        refunded.
        """
        self._meter.leave(request_id, self._num_in_flight, now, until)


class Quotas:
    """The tenants' meters; tenants without a quota share a meter without limits."""

    def __init__(self, tenant_to_quota: Mapping[str, Quota], now: float) -> None:
        self._meters = {
            tenant: Meter(tenant, quota, now) for tenant, quota in tenant_to_quota.items()
        }
        self._unlimited = Meter("", Quota(), now)

    def check(self, tenant: str, num_tokens: int, now: float) -> None:
        """See `Meter.check`."""
        self._meters.get(tenant, self._unlimited).check(num_tokens, now)

    def begin(self, tenant: str, now: float, *, is_free: bool = False) -> QuotaShare:
        """See `Meter.begin`."""
        return self._meters.get(tenant, self._unlimited).begin(now, is_free=is_free)
