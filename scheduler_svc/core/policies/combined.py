"""Several criteria, each deciding where the one before it leaves equals."""

from scheduler_svc.core.policies.deadline import EarliestDeadline
from scheduler_svc.core.policies.fair import TenantFair
from scheduler_svc.core.policies.policy import Place, Policy
from scheduler_svc.core.policies.priority import Priority
from scheduler_svc.core.request import Request


class Combined(Policy):
    """By priority, within a level fair between tenants, within a tenant by deadline or arrival.

    A criterion that is None does not count. With priority, a sequence that has waited for longer
    than the aging period is before newer ones of its priority, whoever's they are: fairness decides
    among those of one period. That is what bounds everybody's wait; a longer period is fairer.
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

    def place(self, request: Request, arrived: float) -> Place:
        """See `Policy`."""
        return Place(
            key=self._deadline.place(request, arrived).key if self._deadline else (arrived,),
            account=request.tenant if self._fair else "",
            band=(self._priority.level(request, arrived),) if self._priority else (),
        )

    def debt(self, account: str) -> float:
        """See `TenantFair`."""
        return self._fair.debt(account) if self._fair else 0.0

    def began_waiting(self, account: str) -> None:
        """See `TenantFair`."""
        if self._fair:
            self._fair.began_waiting(account)

    def stopped_waiting(self, account: str) -> None:
        """See `TenantFair`."""
        if self._fair:
            self._fair.stopped_waiting(account)

    def served(self, account: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """See `TenantFair`."""
        if self._fair:
            self._fair.served(account, num_prompt_tokens, num_output_tokens)
