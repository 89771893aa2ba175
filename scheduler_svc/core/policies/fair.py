"""Serves the least served tenant first, by a virtual token counter.

Follows "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024). Each tenant has a
counter of the tokens that it was served, weighted by their cost. The tenant with the lowest counter
goes first. So while two tenants both have waiting requests, their counters grow by nearly the same
amount. The two amounts are not equal, because a tenant's running requests go on even if the tenant
is ahead. They differ by at most about twice the weighted tokens of all requests that run at one
time. A tenant gains no credit while none of its requests waits: when a request of the tenant waits
again, the tenant's counter is raised at least to the lowest counter of the waiting tenants.
"""

from collections.abc import Mapping

from scheduler_svc.core.interface.request import Request
from scheduler_svc.core.policies.arguments import check_positive
from scheduler_svc.core.policies.policy import Policy, Rank, background

_FEW_COUNTERS = 1024


class TenantFair(Policy):
    """Orders tenants by their counters, and the requests of a tenant by arrival.

    An output token costs more than a prompt token (weights 2 and 1 in the paper), because a step
    computes thousands of prompt tokens, but only one output token per sequence.
    """

    has_accounts = True

    def __init__(self, weight_in: float = 1.0, weight_out: float = 2.0) -> None:
        self._weight_in = check_positive("weight_in", weight_in)
        self._weight_out = check_positive("weight_out", weight_out)
        self._counters: dict[str, float] = {}
        self._waiting: set[str] = set()
        self._floor = 0.0
        """The counter at which a new tenant starts. It follows the lowest counter of the waiting
        tenants, but never falls."""
        self._most_counters = _FEW_COUNTERS

    def rank(self, request: Request, arrived: float) -> Rank:
        return Rank((arrived,), account=request.tenant, level=background(request))

    def num_served(self, account: str) -> float:
        return self._counters.get(account, self._floor)

    def accounts(self) -> Mapping[str, float]:
        """Return how far each counter is above the floor, at which new tenants start."""
        floor = self._floor_now()
        return {
            name: counter - floor for name, counter in self._counters.items() if counter > floor
        }

    def restore(self, accounts: Mapping[str, float]) -> None:
        self._counters = dict(accounts)

    def began_waiting(self, account: str) -> None:
        """Update the floor, and raise the counter of `account` at least to the floor."""
        self._floor = self._floor_now()
        self._counters[account] = max(self.num_served(account), self._floor)
        self._waiting.add(account)
        if len(self._counters) > self._most_counters:
            self._forget()

    def stopped_waiting(self, account: str) -> None:
        """If no tenant waits any more, raise the floor at least to the counter of `account`."""
        self._waiting.remove(account)
        if not self._waiting:
            self._floor = max(self._floor, self.num_served(account))

    def charge(self, account: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self._counters[account] = (
            self.num_served(account)
            + self._weight_in * num_prompt_tokens
            + self._weight_out * num_output_tokens
        )

    def _floor_now(self) -> float:
        lowest = min((self._counters[name] for name in self._waiting), default=self._floor)
        return max(self._floor, lowest)

    def _forget(self) -> None:
        """Drop each counter that is not above the floor, unless its tenant waits."""
        self._counters = {
            name: counter
            for name, counter in self._counters.items()
            if counter > self._floor or name in self._waiting
        }
        # Wait until the number of counters doubles, so that the cost per new tenant is O(1).
        self._most_counters = max(_FEW_COUNTERS, 2 * len(self._counters))
