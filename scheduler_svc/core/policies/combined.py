"""Combines several scheduling criteria; each criterion breaks the ties of the previous one."""

from collections.abc import Mapping

from scheduler_svc.core.interface.request import Request
from scheduler_svc.core.policies.deadline import EarliestDeadline
from scheduler_svc.core.policies.fair import TenantFair
from scheduler_svc.core.policies.policy import Policy, Rank, background
from scheduler_svc.core.policies.priority import Priority


class Combined(Policy):
    """Orders requests by priority, then by fairness to tenants, then by deadline or arrival.

    A criterion that is None is left out. The priority criterion gives each sequence a level
    (`Priority.level`). Sequences of a lower level go first; fairness and deadline decide only
    within a level. For each priority, the level of new sequences rises by one every `aging_s`
    seconds. So in time all new sequences go after a waiting sequence, whatever their priorities and
    tenants, and no sequence waits for ever. The longer the period `aging_s`, the more sequences
    have the same level, and the fairer the order is to tenants.
    """

    def __init__(
        self,
        priority: Priority | None,
        fair: TenantFair | None,
        deadline: EarliestDeadline | None,
    ) -> None:
        self._priority = priority
        self._fair = fair
        self._deadline = deadline
        self.has_accounts = fair is not None

    def rank(self, request: Request, arrived: float) -> Rank:
        return Rank(
            key=self._deadline.rank(request, arrived).key if self._deadline else (arrived,),
            account=request.tenant if self._fair else "",
            level=(self._priority.level(request, arrived),)
            if self._priority
            else background(request),
        )

    def num_served(self, account: str) -> float:
        return self._fair.num_served(account) if self._fair else 0.0

    def accounts(self) -> Mapping[str, float]:
        return self._fair.accounts() if self._fair else {}

    def restore(self, accounts: Mapping[str, float]) -> None:
        if self._fair:
            self._fair.restore(accounts)

    def began_waiting(self, account: str) -> None:
        if self._fair:
            self._fair.began_waiting(account)

    def stopped_waiting(self, account: str) -> None:
        if self._fair:
            self._fair.stopped_waiting(account)

    def charge(self, account: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        if self._fair:
            self._fair.charge(account, num_prompt_tokens, num_output_tokens)
