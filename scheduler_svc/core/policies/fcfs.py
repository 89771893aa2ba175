"""First come, first served."""

from scheduler_svc.core.policies.policy import Policy, Rank, background
from scheduler_svc.core.values.request import Request


class Fcfs(Policy):
    def rank(self, request: Request, arrived: float) -> Rank:
        return Rank((arrived,), level=background(request))
