"""First come, first served."""

from scheduler_svc.core.policies.policy import Policy, Rank
from scheduler_svc.core.values.request import Request


class Fcfs(Policy):
    def rank(self, request: Request, arrived: float) -> Rank:  # noqa: ARG002
        return Rank((arrived,))
