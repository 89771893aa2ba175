"""First come, first served."""

from scheduler_svc.core.interface.request import Request
from scheduler_svc.core.policies.policy import Policy, Rank, background


class Fcfs(Policy):
    def rank(self, request: Request, arrived: float) -> Rank:
        return Rank((arrived,), level=background(request))
