"""Earliest deadline first; a request without a deadline gets a default one."""

from scheduler_svc.core.interface.request import Request
from scheduler_svc.core.policies.arguments import check_positive
from scheduler_svc.core.policies.policy import Policy, Rank, background


class EarliestDeadline(Policy):
    """Orders requests by deadline; each is due at the latest `patience_s` after its arrival.

    So a request does not wait for requests that arrive more than `patience_s` seconds after it.
    Only requests of the lowest priority, such as those of batches, wait for all requests of higher
    priority.
    """

    def __init__(self, patience_s: float = 60.0) -> None:
        self._patience_s = check_positive("patience_s", patience_s)

    def rank(self, request: Request, arrived: float) -> Rank:
        latest = arrived + self._patience_s
        due = latest if request.deadline is None else min(latest, request.deadline)
        return Rank((due,), level=background(request))
