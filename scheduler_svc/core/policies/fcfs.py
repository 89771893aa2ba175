"""First come, first served."""

from scheduler_svc.core.policies.policy import Place, Policy
from scheduler_svc.core.request import Request


class Fcfs(Policy):
    """By arrival."""

    def place(self, request: Request, arrived: float) -> Place:  # noqa: ARG002
        """See `Policy`."""
        return Place((arrived,))
