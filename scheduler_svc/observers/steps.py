"""The two events of a worker's step, and what observes them.

A session tells each of its observers, in order, that a step was sent and that it was answered.
Steps are answered in the order in which they were sent.
"""

import time
from dataclasses import dataclass
from typing import Protocol

from contract.step import Plan
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.pacing import Pace, StepPacer
from scheduler_svc.core.reports.load import Queues
from scheduler_svc.observers.rate_meter import RateMeter


@dataclass(frozen=True, slots=True)
class SentStep:
    """A step that was just sent."""

    plan: Plan
    step_id: int
    """As on the wire."""
    queues: Queues
    """The core's, right after planning."""
    took_s: float
    """How long planning, encoding and sending took."""


@dataclass(frozen=True, slots=True)
class AnsweredStep:
    """The oldest step in flight, whose result was just applied."""

    step_id: int
    """As on the wire."""
    execute_s: float
    """As the worker measured it."""
    rpc_s: float
    """From sending the step to receiving its result."""
    update_s: float
    """How long applying the result and writing the routers' messages took."""
    at_s: float
    """When that was done, by the wall clock."""


class StepObserver(Protocol):
    """Follows the steps of one attachment of a worker. Costs constant work for a step."""

    def on_sent(self, step: SentStep) -> None:
        """A step was sent."""

    def on_answered(self, step: AnsweredStep) -> None:
        """The oldest step in flight was answered, and its result applied."""


class PacingObserver:
    """Teaches the pacer and the rate meter how long steps take."""

    def __init__(self, config: SchedulerConfig, pace: Pace) -> None:
        self.meter = RateMeter(config.busy_step_tokens)
        self.pacer = StepPacer(pace, config)

    def on_sent(self, step: SentStep) -> None:
        # Until the pacer has seen prompts, its bound is a guess, below what there is time for.
        bound = self.pacer.max_prompt_tokens if self.pacer.knows_prompts else None
        self.meter.sent(step.plan, bound)
        self.pacer.sent(step.plan, time.monotonic())

    def on_answered(self, step: AnsweredStep) -> None:
        self.meter.answered(step.execute_s)
        self.pacer.answered(step.execute_s, time.monotonic())
