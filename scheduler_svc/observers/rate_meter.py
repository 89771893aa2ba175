"""Measures the best speed of a worker, which shows whether a request can meet its deadline."""

import math
from collections import deque

from contract.step import Plan
from scheduler_svc.core.limits.acceptance import WorkerRates

_FORGETTING = 0.99
"""The factor by which the best value decays with each new observation. Chosen, not measured."""


class RateMeter:
    """Keeps the best rates of the last few hundred steps.

    So a request is refused only if it would miss its deadline even at the worker's best speed.

    Only full steps show how fast prompts are computed. A step is full if it keeps the device at
    least half busy, or has as many tokens as the pacer allows. A smaller step takes about the same
    time with any number of tokens.
    """

    def __init__(self, busy_step_tokens: int) -> None:
        """`busy_step_tokens` is the number of tokens in a step that keep the device busy."""
        self.rates = WorkerRates()
        self._full_enough = busy_step_tokens / 2
        self._in_flight: deque[tuple[Plan, float]] = deque()
        """The plan of each step in flight, with the number of tokens from which it is full."""

    def on_sent(self, plan: Plan, max_prompt_tokens: int | None = None) -> None:
        """Record a plan that was sent; `max_prompt_tokens` was the pacer's limit, if any."""
        most = math.inf if max_prompt_tokens is None else max_prompt_tokens
        self._in_flight.append((plan, min(self._full_enough, most)))

    def on_result(self, execute_s: float) -> None:
        """Learn from the time that the worker took for the oldest step in flight."""
        plan, full_enough = self._in_flight.popleft()
        if execute_s <= 0:
            return
        rate, step_s = self.rates.prefill_tokens_per_s, self.rates.step_s
        if plan.num_scheduled_tokens == plan.num_decodes:
            if plan.num_decodes:
                best = execute_s if step_s is None else min(execute_s, step_s / _FORGETTING)
                self.rates = WorkerRates(rate, best)
        elif plan.num_scheduled_tokens >= full_enough:
            seen = plan.num_scheduled_tokens / execute_s
            self.rates = WorkerRates(
                seen if rate is None else max(seen, rate * _FORGETTING), step_s
            )
