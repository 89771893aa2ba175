"""Measures the best speed of a worker, which shows whether a request can meet its deadline."""

import math
from collections import deque

from contract.step import Plan
from scheduler_svc.core.limits.acceptance import WorkerRates

_FORGETTING = 0.99
"""The factor by which a best rate decays with each step that measures it. Chosen, not measured."""


class RateMeter:
    """Keeps the best rates of the last few hundred steps.

    The best rates show the worker's best speed. A request is refused because of its deadline only
    if it would miss the deadline even at this speed.

    The rate of prompt tokens is measured only on full steps, because a smaller step takes about the
    same time with any number of tokens. A step is full if it keeps the device at least half busy,
    or has as many tokens as the pacer allows.
    """

    def __init__(self, busy_step_tokens: int) -> None:
        """`busy_step_tokens` is the number of tokens in a step that keep the device busy."""
        self.rates = WorkerRates()
        self._full_enough = busy_step_tokens / 2
        self._in_flight: deque[tuple[Plan, float]] = deque()
        """For each step in flight: its plan, and how many tokens make it a full step."""

    def on_sent(self, plan: Plan, max_prompt_tokens: int | None = None) -> None:
        """Record a plan that was sent; `max_prompt_tokens`: the pacer's limit, if it has one."""
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
