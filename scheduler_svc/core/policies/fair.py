"""The tenant that has been served least goes first: a virtual token counter.

After "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024): each tenant has a
counter of the tokens it was served, weighted by what they cost. The tenant with the lowest counter
goes first, so that of two tenants that both have work waiting all along, neither gets ahead of the
other by more than what one batch holds. One that comes back is lifted to the lowest counter of
those that wait: time in which a tenant wanted nothing is no credit.
"""

from scheduler_svc.core.policies.arguments import check_positive
from scheduler_svc.core.policies.policy import Policy, Rank
from scheduler_svc.core.request import Request

_FEW_COUNTERS = 1024


class TenantFair(Policy):
    """By the tenants' counters; within a tenant by arrival.

    An output token costs more than a prompt token (weights 2 and 1 in the paper), because a step
    computes thousands of the one, but only one of the other for each sequence.
    """

    has_accounts = True

    def __init__(self, weight_in: float = 1.0, weight_out: float = 2.0) -> None:
        self._weight_in = check_positive("weight_in", weight_in)
        self._weight_out = check_positive("weight_out", weight_out)
        self._counters: dict[str, float] = {}
        self._waiting: set[str] = set()
        self._floor = 0.0
        """The lowest counter of those that waited when it was last asked for; never falls."""
        self._most_counters = _FEW_COUNTERS

    def rank(self, request: Request, arrived: float) -> Rank:
        return Rank((arrived,), account=request.tenant)

    def num_served(self, account: str) -> float:
        """Return the tenant's counter."""
        return self._counters.get(account, self._floor)

    def began_waiting(self, account: str) -> None:
        """Lift a tenant that comes back to those that wait."""
        self._raise_floor()
        self._counters[account] = max(self.num_served(account), self._floor)
        self._waiting.add(account)
        if len(self._counters) > self._most_counters:
            self._forget()

    def stopped_waiting(self, account: str) -> None:
        """Let the next that comes be lifted to the last that left, if none waits then."""
        self._waiting.remove(account)
        if not self._waiting:
            self._floor = max(self._floor, self.num_served(account))

    def charge(self, account: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Charge a tenant."""
        self._counters[account] = (
            self.num_served(account)
            + self._weight_in * num_prompt_tokens
            + self._weight_out * num_output_tokens
        )

    def _raise_floor(self) -> None:
        if self._waiting:
            self._floor = max(self._floor, min(self._counters[name] for name in self._waiting))

    def _forget(self) -> None:
        """Drop the counters that say no more than the floor does."""
        self._counters = {
            name: counter
            for name, counter in self._counters.items()
            if counter > self._floor or name in self._waiting
        }
        # Not again before as many have come: then a tenant that comes costs O(1) of it.
        self._most_counters = max(_FEW_COUNTERS, 2 * len(self._counters))
