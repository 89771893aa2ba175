"""How fast a worker is at its best, from the steps it does: which deadlines cannot be met."""

from collections import deque

from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.rates import Rates

_FORGETTING = 0.99
"""How much of an old best remains with each new observation."""


class RateMeter:
    """The best of the last few hundred steps: a refusal for lack of time must not be wrong.

    Only a step that is at least half full says how fast prompts are computed; a smaller one costs
    about the same however few tokens it has.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.rates = Rates()
        self._full_enough = max_num_batched_tokens / 2
        self._in_flight: deque[StepPlan] = deque()

    def sent(self, plan: StepPlan) -> None:
        """Note that a step goes out."""
        self._in_flight.append(plan)

    def answered(self, execute_s: float) -> None:
        """Note how long the worker took for the oldest step that is in flight."""
        plan = self._in_flight.popleft()
        if execute_s <= 0:
            return
        rate, step_s = self.rates.prefill_tokens_per_s, self.rates.step_s
        if plan.num_scheduled_tokens == plan.num_decodes:
            if plan.num_decodes:
                best = execute_s if step_s is None else min(execute_s, step_s / _FORGETTING)
                self.rates = Rates(rate, best)
        elif plan.num_scheduled_tokens >= self._full_enough:
            seen = plan.num_scheduled_tokens / execute_s
            self.rates = Rates(seen if rate is None else max(seen, rate * _FORGETTING), step_s)
