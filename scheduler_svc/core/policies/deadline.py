"""Earliest deadline first; a request without one has one, too."""

from scheduler_svc.core.policies.arguments import check_positive
from scheduler_svc.core.policies.policy import Policy, Rank
from scheduler_svc.core.request import Request


class EarliestDeadline(Policy):
    """By deadline; one later than `patience_s` after arrival, or none, counts as that.

    So no sequence waits behind those that arrive more than `patience_s` after it.
    """

    def __init__(self, patience_s: float = 60.0) -> None:
        self._patience_s = check_positive("patience_s", patience_s)

    def rank(self, request: Request, arrived: float) -> Rank:
        latest = arrived + self._patience_s
        return Rank((latest if request.deadline is None else min(latest, request.deadline),))
