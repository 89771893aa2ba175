"""Serves higher priorities first; waiting raises the priority, so no sequence waits for ever."""

from math import floor

from scheduler_svc.core.interface.request import Request
from scheduler_svc.core.policies.arguments import check_positive
from scheduler_svc.core.policies.policy import Policy, Rank


class Priority(Policy):
    """Orders requests by priority; every `aging_s` seconds of waiting raise it by one.

    All sequences age at the same pace, so their order never changes: sequence `a` goes before `b`
    if `priority(a) + (now - arrived(a)) / aging_s` is greater than the same sum for `b`, and `now`
    cancels out.
    """

    def __init__(self, aging_s: float = 60.0) -> None:
        self._aging_s = check_positive("aging_s", aging_s)

    def rank(self, request: Request, arrived: float) -> Rank:
        return Rank((arrived - request.priority * self._aging_s, arrived))

    def level(self, request: Request, arrived: float) -> int:
        """Return the level for `Combined`: sequences of a lower level go first.

        Time is divided into periods of `aging_s` seconds. Sequences of one priority that arrive in
        the same period share a level; in the next period the level is greater by one.
        """
        return floor(arrived / self._aging_s) - request.priority
