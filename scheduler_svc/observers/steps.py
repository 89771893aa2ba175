"""The two events of a worker's step, `SentStep` and `AnsweredStep`, and their observers.

A session calls each of its observers, in order, when it has sent a step and when it has applied the
step's result. Results come in the order of the steps.
"""

import time
from dataclasses import dataclass
from typing import Protocol

from contract.step import Plan
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.pacing import Pace, StepPacer
from scheduler_svc.core.reports.load import Queues
from scheduler_svc.observers.rate_meter import RateMeter


@dataclass(frozen=True, slots=True)
class SentStep:
    """A step that was just sent."""

    plan: Plan
    step_id: int
    """The step's id on the wire."""
    queues: Queues
    """The queues of the core right after planning."""
    took_s: float
    """How long planning, encoding and sending took."""


@dataclass(frozen=True, slots=True)
class AnsweredStep:
    """A step whose result was just applied; it was the oldest step in flight."""

    step_id: int
    """The step's id on the wire."""
    execute_s: float
    """How long the worker took to compute the step, by its own measurement."""
    rpc_s: float
    """The time from sending the step to receiving its result."""
    update_s: float
    """How long applying the result and writing the routers' messages took."""
    at_s: float
    """When the result had been applied, on the wall clock."""


class StepObserver(Protocol):
    """Observes the steps of one attachment of a worker, at a constant cost per step."""

    def on_sent(self, step: SentStep) -> None:
        """Called when a step was sent."""

    def on_answered(self, step: AnsweredStep) -> None:
        """Called when the result of the oldest step in flight was applied."""


class PacingObserver:
    """Reports the times of steps to the pacer and the rate meter."""

    def __init__(self, config: SchedulerConfig, pace: Pace) -> None:
        self.meter = RateMeter(config.busy_step_tokens)
        self.pacer = StepPacer(pace, config)

    def on_sent(self, step: SentStep) -> None:
        # Until the pacer has seen prompts, its bound is a guess, and too low.
        bound = self.pacer.max_prompt_tokens if self.pacer.knows_prompts else None
        self.meter.on_sent(step.plan, bound)
        self.pacer.on_sent(step.plan, time.monotonic())

    def on_answered(self, step: AnsweredStep) -> None:
        self.meter.on_result(step.execute_s)
        self.pacer.on_result(step.execute_s, time.monotonic())
