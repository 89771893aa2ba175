"""Measures how fast a worker is at its best, to refuse deadlines that cannot be met."""

import math
from collections import deque

from contract.step import Plan
from scheduler_svc.core.limits import Rates

_FORGETTING = 0.99
"""How much of an old best remains with each new observation. Chosen, not measured."""


class RateMeter:
    """Keeps the best of the last few hundred steps: a refusal for lack of time must not be wrong.

    Only a step that keeps the device at least half busy, or has all the tokens that there is time
    for, tells how fast prompts are computed; a smaller one costs about the same however few it has.
    """

    def __init__(self, busy_step_tokens: int) -> None:
        """`busy_step_tokens` is how many tokens keep the device busy in a step."""
        self.rates = Rates()
        self._full_enough = busy_step_tokens / 2
        self._in_flight: deque[tuple[Plan, float]] = deque()
        """With how many tokens each is full enough."""

    def sent(self, plan: Plan, max_prompt_tokens: int | None = None) -> None:
        """Take a step that goes out; its prompts may have so many tokens, None: any number."""
        most = math.inf if max_prompt_tokens is None else max_prompt_tokens
        self._in_flight.append((plan, min(self._full_enough, most)))

    def answered(self, execute_s: float) -> None:
        """Learn from how long the worker took for the oldest step in flight."""
        plan, full_enough = self._in_flight.popleft()
        if execute_s <= 0:
            return
        rate, step_s = self.rates.prefill_tokens_per_s, self.rates.step_s
        if plan.num_scheduled_tokens == plan.num_decodes:
            if plan.num_decodes:
                best = execute_s if step_s is None else min(execute_s, step_s / _FORGETTING)
                self.rates = Rates(rate, best)
        elif plan.num_scheduled_tokens >= full_enough:
            seen = plan.num_scheduled_tokens / execute_s
            self.rates = Rates(seen if rate is None else max(seen, rate * _FORGETTING), step_s)
