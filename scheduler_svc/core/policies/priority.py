"""Serves higher priorities first; waiting raises the priority, so no sequence waits for ever."""

from math import floor

from scheduler_svc.core.interface.request import Request
from scheduler_svc.core.policies.arguments import check_positive
from scheduler_svc.core.policies.policy import Policy, Rank


class Priority(Policy):
    """Orders requests by priority; a waiting sequence gains one level every `aging_s` seconds.

    All sequences age at the same pace, so their order never changes: sequence `a` goes before `b`
    if `priority(a) + (now - arrived(a)) / aging_s` is greater, and `now` cancels out.
    """

    def __init__(self, aging_s: float = 60.0) -> None:
        self._aging_s = check_positive("aging_s", aging_s)

    def rank(self, request: Request, arrived: float) -> Rank:
        return Rank((arrived - request.priority * self._aging_s, arrived))

    def level(self, request: Request, arrived: float) -> int:
        """Return the level for `Combined`: smaller goes first, other criteria decide within it.

        A sequence gains a level when the clock passes a multiple of `aging_s`. So sequences of one
        priority that arrive between two multiples always share a level.
        """
        return floor(arrived / self._aging_s) - request.priority
